"""`python -m onelag`, so that torchrun can start it: torchrun --nproc-per-node 4 -m onelag train …"""

from onelag.cli import main

if __name__ == "__main__":
    main()
