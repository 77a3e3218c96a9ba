"""`python -m phalanx`: the `phalanx` command, where the scripts of an environment are not on the path."""

from phalanx_command import main

if __name__ == "__main__":
    main()
