"""`lockstep` and `python -m lockstep`: this process becomes the program."""

import os
import sys

from lockstep import program


def main():
    os.execv(program, ["lockstep", *sys.argv[1:]])


if __name__ == "__main__":
    main()
