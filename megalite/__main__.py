"""`python -m megalite` is the `megalite` command."""

from megalite.cli.main import main

if __name__ == "__main__":
    main()
