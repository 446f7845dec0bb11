"""What the scripts share in how they meet a user."""

import argparse


class Parser(argparse.ArgumentParser):
    """Refuses bad arguments in one sentence, with exit code 2."""

    def error(self, message):
        self.exit(2, f"error: {message} (see --help)\n")
