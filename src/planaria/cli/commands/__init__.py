"""What the core's commands do; :mod:`planaria.cli.groups` declares them."""
