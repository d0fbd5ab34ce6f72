"""``python -m planaria``."""

from planaria.cli import main

if __name__ == "__main__":
    main()
