"""A file that says whose the files of a folder are. So a run that was stopped goes on with its own files alone."""

from pathlib import Path


def mark(file: Path, text: str, what: str) -> None:
    """Writes a text to a file, whole or not at all. If the file is there, it must hold the same text.

    Args:
      file: the file. Its folder is made.
      text: the settings of the run.
      what: in words, what the folder holds if the file has another text.

    Raises:
      ValueError: the file holds another text.
    """
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        new.write_text(text, "utf-8")
        new.replace(file)
    elif file.read_text("utf-8") != text:
        raise ValueError(f"{file.parent} holds {what}; remove the folder or give another one")
