"""Entry point of `python -m autopart`: the command line."""

from autopart.cli.main import main

if __name__ == "__main__":
    main(prog_name="autopart")
