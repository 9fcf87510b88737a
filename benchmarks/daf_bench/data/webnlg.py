"""WebNLG in its published XML: triples of a graph, and texts that say what they say.

Gardent et al., "The WebNLG Challenge: Generating Text from RDF Data", INLG 2017. A prompt is an
entry's triples in one line, as the code of LoRA (Hu et al., ICLR 2022) writes them.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import cast
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from daf.core.errors import DataError
from daf_bench.data.guarded_files import open_data
from daf_bench.data.sentence_tasks import NO_CLASSES, SentenceData
from daf_bench.data.sentences import DEFAULT_CONTEXT, Example, in_tokens

_PARTS = ("train", "dev")
_MOST_BYTES = 64 * 10**6  # of a file
_MOST_CHARACTERS = 50_000  # from one entry's end to the next one's; published ones have some 2,000
_BLOCK = 4096  # characters
_AROUND = ["benchmark", "entries"]
_DECLARATIONS = (b"<!DOCTYPE", b"<!ENTITY")  # few entities can stand for gigabytes


def load_webnlg(
    path: Path, context: int = DEFAULT_CONTEXT, tokenizer: str | None = None
) -> SentenceData:
    """Read WebNLG from the folder ``path``, cut to ``context`` tokens a row.

    The training part is ``train.xml``, or every ``*.xml`` below a folder ``train``; the test part
    likewise ``dev``. An entry gives as many examples as it has English texts that no comment but
    "good" is on. ``tokenizer``: folder of a model; None: byte by byte.

    Raises:
        DataError: a file is missing, damaged, or of another form, or a part has no examples.
    """
    parts = (_read(path, part) for part in _PARTS)
    return in_tokens(f"webnlg:{path}", parts, NO_CLASSES, context, tokenizer, generates=True)


def _read(folder: Path, part: str) -> list[Example]:
    files = _files(folder, part)
    examples = [
        example
        for file in files
        for entry in _entries(file, folder)
        for example in _examples(file, entry)
    ]
    if not examples:
        place = files[0] if len(files) == 1 else folder / part
        raise DataError(
            f"{place} holds no examples; expected English texts with the comment 'good', or none"
        )
    return examples


def _files(folder: Path, part: str) -> list[Path]:
    if (folder / f"{part}.xml").exists():
        return [folder / f"{part}.xml"]
    try:
        files = sorted((folder / part).rglob("*.xml"))
    except (OSError, RecursionError) as error:
        raise DataError(f"{folder / part} cannot be searched for .xml files: {error}") from error
    if not files:
        raise DataError(
            f"asked for webnlg:{folder}, but there is no {part}.xml in it, nor .xml files below a "
            f"folder {part}; name a release's folder for English"
        )
    return files


def _entries(path: Path, inside: Path) -> Iterator[Element]:
    """Yield a file's entries, holding few at a time."""
    count = 0
    try:
        for entry in _parsed(path, inside):
            count += 1
            yield entry
    except ParseError as error:
        raise DataError(
            f"{path} is not a whole XML file ({error}); it may be truncated: fetch it again"
        ) from error
    if not count:
        raise DataError(f"{path} holds no entries; expected <benchmark><entries><entry>")


def _parsed(path: Path, inside: Path) -> Iterator[Element]:
    parser: XMLPullParser[Element] = XMLPullParser(("start", "end"))
    opened: list[Element] = []
    waited = 0
    for characters in _fed(parser, path, inside):
        entries = list(_ended(parser, opened))
        waited = characters if entries else waited + characters
        if waited > _MOST_CHARACTERS:
            raise DataError(
                f"{path}: expected the next entry's end within {_MOST_CHARACTERS} characters, "
                f"found {waited} without one"
            )
        yield from entries


def _fed(parser: XMLPullParser[Element], path: Path, inside: Path) -> Iterator[int]:
    """Feed the parser a block at a time; yield each one's characters."""
    for block in _blocks(path, inside):
        parser.feed(block)
        yield len(block)
    parser.close()  # which may have kept the last block until then
    yield 0


def _ended(parser: XMLPullParser[Element], opened: list[Element]) -> Iterator[Element]:
    """Yield entries that have come to their end; ``opened`` are the elements that have not."""
    for kind, element in cast("Iterator[tuple[str, Element]]", parser.read_events()):
        if kind == "start":
            opened.append(element)
            continue
        opened.pop()
        if len(opened) <= len(_AROUND):
            if [each.tag for each in (*opened, element)] == [*_AROUND, "entry"]:
                yield element
            for parent in opened[-1:]:
                parent.clear()  # or the tree would hold all that has been read


def _blocks(path: Path, inside: Path) -> Iterator[str]:
    """Yield the text of a file that declares no entities; raises DataError.

    As text, since a parser of bytes takes a file's word for the characters they stand for.
    """
    content = _checked(path, inside)
    try:
        with io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline="") as text:
            while block := text.read(_BLOCK):
                yield block
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 text: {error}") from error


def _checked(path: Path, inside: Path) -> bytes:
    with open_data(path, inside) as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise DataError(f"{path} has more than {_MOST_BYTES} bytes; split it into several files")
    if b"\0" in content:  # a parser would take it for UTF-16, where declarations look otherwise
        raise DataError(f"{path} holds a zero byte; expected UTF-8 text: convert the file")
    if any(each in content for each in _DECLARATIONS):
        raise DataError(
            f"{path} declares a document type or entities; expected WebNLG's XML, which has none: "
            "remove the declaration"
        )
    return content


def _examples(path: Path, entry: Element) -> list[Example]:
    where = f"{path}, entry {entry.get('eid', 'without an eid')[:80]}"
    triples, texts = entry.findall("modifiedtripleset/mtriple"), entry.findall("lex")
    if not triples or not texts:
        raise DataError(
            f"{where}: expected triples <modifiedtripleset><mtriple> and texts <lex>, "
            f"found {len(triples)} and {len(texts)}"
        )
    prompt = " | ".join(_triple(where, each) for each in triples)
    return [(prompt, _text(where, each), 0.0) for each in texts if _is_wanted(each)]


def _triple(where: str, element: Element) -> str:
    found = _content(element)
    parts = [part.strip() for part in found.split(" | ")]
    if len(parts) != 3 or not all(parts):
        raise DataError(f"{where}: expected 'subject | predicate | object', found {found[:80]!r}")
    return " : ".join(parts)


def _is_wanted(text: Element) -> bool:
    return (text.get("lang") or "en") == "en" and (text.get("comment") or "good") == "good"


def _text(where: str, element: Element) -> str:
    if found := _content(element):
        return found
    lid = element.get("lid", "without a lid")[:80]
    raise DataError(f"{where}: expected a text in <lex> {lid}, found none, or other elements")


def _content(element: Element) -> str:
    """Return the text of an element; an empty one if other elements are in it."""
    return "" if len(element) else (element.text or "").strip()
