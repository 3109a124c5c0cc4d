"""`python -m k3dsl`."""

from k3dsl.cli import main

if __name__ == "__main__":
    main()
