"""`python -m paddle_dp VERB …` is `paddle-dp VERB …`."""

from paddle_dp.cli import main

if __name__ == "__main__":
    main()
