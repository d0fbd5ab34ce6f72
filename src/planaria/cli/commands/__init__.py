"""The core's commands, a module per command or group; a new module here registers its commands by ``@command``.

Every invocation imports all of them: a command imports what it needs when it runs, so that ``planaria --help`` imports
neither torch nor pydantic.
"""
