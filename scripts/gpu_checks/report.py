"""Rows of the table at the end of a check, and how it is written."""

import dataclasses
import json
import pathlib

TABLE_CHARACTERS = 12_000
LINE_CHARACTERS = 160
FILES, FILE_BYTES = 8, 16 << 20
TEXTS = {"table.txt", "log.txt"}

OK, FAILED, VALUE, LEFT_OUT = "ok", "FAILED", "value", "left out"


@dataclasses.dataclass
class Row:
    stage: str
    check: str
    state: str
    detail: str = ""

    def line(self):
        text = f"{self.stage:<9} {self.state:<8} {self.check}"
        if self.detail:
            text += f": {self.detail}"
        return text if len(text) <= LINE_CHARACTERS else text[:LINE_CHARACTERS - 3] + "..."


def one_line(text):
    """Returns the last line that is not blank."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    lines = [" ".join(line.split()) for line in str(text).splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def holds_results_alone(folder):
    """Returns whether a folder holds nothing but what Report.write() writes, or nothing."""
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        return False
    files = list(folder.iterdir())
    names = {path.name for path in files}
    documents = names - TEXTS
    return (all(path.is_file() for path in files)
            and (not names or TEXTS <= names)
            and len(documents) <= FILES - len(TEXTS)
            and all(name.endswith(".json") for name in documents))


class Report:
    """Collects rows, passes each to `tell` at once, and keeps the output of commands."""

    def __init__(self, tell=print):
        self.rows, self.log, self.documents, self._tell = [], [], {}, tell

    def add(self, stage, check, state, detail=""):
        self.rows.append(Row(stage, check, state, one_line(detail) if detail else ""))
        self._tell(self.rows[-1].line())

    def note(self, text):
        """Adds text to the log only."""
        self.log.append(text)

    def document(self, name, content):
        """Keeps something whole, as a JSON file."""
        self.documents[name] = content

    def failed(self):
        return [row for row in self.rows if row.state == FAILED]

    def table(self, characters=TABLE_CHARACTERS):
        """Returns all rows; if they are too long, the failed ones first, then as many as fit."""
        counts = {state: sum(row.state == state for row in self.rows)
                  for state in (OK, FAILED, VALUE, LEFT_OUT)}
        summary = ", ".join(f"{count} {state}" for state, count in counts.items())
        lines = [row.line() for row in self.rows]
        if len("\n".join([*lines, summary])) <= characters:
            return "\n".join([*lines, summary])
        rank = {FAILED: 0, VALUE: 1, LEFT_OUT: 2, OK: 3}
        kept, room = [], characters - len(summary) - 60
        for row in sorted(self.rows, key=lambda row: rank[row.state]):
            room -= len(row.line()) + 1
            if room < 0:
                break
            kept.append(row.line())
        more = f"({len(lines) - len(kept)} more rows are in table.txt)"
        return "\n".join([*kept, more, summary])

    def write(self, folder):
        """Writes table.txt, log.txt and the documents, within the limits on files to return."""
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = {"table.txt": "\n".join(row.line() for row in self.rows) + "\n",
                 "log.txt": "\n".join(self.log) + "\n"}
        for name, content in list(self.documents.items())[:FILES - len(files)]:
            files[name + ".json"] = json.dumps(content, indent=1)
        for name, text in files.items():
            (folder / name).write_bytes(text.encode()[-FILE_BYTES:])
