"""Run the `tinsmith` command: python -m tinsmith."""

from tinsmith.cli import main

if __name__ == "__main__":
    main()
