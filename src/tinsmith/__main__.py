"""`python -m tinsmith` is the command `tinsmith`."""

from tinsmith.cli import main

if __name__ == "__main__":
    main()
