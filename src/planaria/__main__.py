"""Entry point of ``planaria`` and of ``python -m planaria``."""

import signal


def main() -> None:
    """Run the command line.

    Importing it takes 0.3 s. Until it handles Ctrl-C itself, Ctrl-C ends the process without a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored in the background of a script
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from planaria.cli.entry import main as run

    run()


if __name__ == "__main__":
    main()
