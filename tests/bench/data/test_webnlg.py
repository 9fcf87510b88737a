"""WebNLG: which texts become examples, token by token, and which files are refused."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

import pytest
from daf_bench.data import webnlg
from daf_bench.data.sentence_tasks import SentenceData

from daf.core.errors import DataError
from daf.training.data import load_data

SEPARATOR, END, PADDING = 256, 257, 258
TRIPLES = ('Aarhus_Airport | cityServed | "Aarhus, Denmark"', "Aarhus | mayor | Jacob_Bundsgård")
PROMPT = 'Aarhus_Airport : cityServed : "Aarhus, Denmark" | Aarhus : mayor : Jacob_Bundsgård'


def lex(text: str, **attributes: str) -> str:
    said = "".join(f" {name}={quoteattr(value)}" for name, value in attributes.items())
    return f"<lex{said}>{escape(text)}</lex>"


def entry(*texts: str, triples: tuple[str, ...] = TRIPLES, eid: str = "Id1") -> str:
    """An entry as it is published; the original triples are others than the modified ones."""
    said = "".join(f"\n  <mtriple>{escape(each)}</mtriple>" for each in triples)
    return f"""<entry category="Airport" eid="{eid}" size="{len(triples)}">
      <originaltripleset><otriple>a | b | c</otriple></originaltripleset>
      <modifiedtripleset>{said}
      </modifiedtripleset>
      {"".join(texts)}
    </entry>"""


def benchmark(*entries: str) -> str:
    head = '<?xml version="1.0" encoding="utf-8"?>\n'
    return f"{head}<benchmark>\n  <entries>\n    {''.join(entries)}\n  </entries>\n</benchmark>\n"


SMALL = benchmark(entry(lex("Fine.", comment="good", lid="Id1")))


def write(folder: Path, train: str | bytes = SMALL, dev: str | bytes = SMALL) -> Path:
    for name, content in (("train", train), ("dev", dev)):
        path = folder / f"{name}.xml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def sentences(folder: Path, context: int = 128) -> SentenceData:
    data = load_data(f"webnlg:{folder}", context=context)
    assert isinstance(data, SentenceData)
    return data


def row(prompt: str, text: str, context: int = 128) -> list[int]:
    tokens = [*prompt.encode(), SEPARATOR, *text.encode(), END]
    return tokens + [PADDING] * (context - len(tokens))


def texts_of(data: SentenceData) -> list[str]:
    """The training texts, byte by byte."""
    rows = zip(data.train.tokens.tolist(), data.train.prompts, data.train.lengths, strict=True)
    return [bytes(tokens[prompt : length - 1]).decode() for tokens, prompt, length in rows]


def test_triples_are_the_prompt_of_each_text(tmp_path: Path) -> None:
    texts = ["Jacob Bundsgård & co. serve Aarhus.", "Aarhus has\n an airport."]
    good = [lex(f"\n  {text} ", comment="good", lid=f"Id{n}") for n, text in enumerate(texts)]
    other = entry(lex("C."), triples=("A_a | b | c",), eid="Id2")
    data = sentences(write(tmp_path, benchmark(entry(*good), other)))
    assert data.train.tokens.tolist() == [
        row(PROMPT, texts[0]),
        row(PROMPT, texts[1]),
        row("A_a : b : c", "C."),
    ]
    assert data.test.tokens.tolist() == [row(PROMPT, "Fine.")]
    before = [len(PROMPT.encode()) + 1] * 2 + [12]
    assert data.train.prompts.tolist() == before
    behind = [len(text.encode()) + 1 for text in (*texts, "C.")]
    assert data.train.lengths.tolist() == [a + b for a, b in zip(before, behind, strict=True)]
    assert data.generates
    assert data.facts == {"vocabulary": 259, "context": 128}
    assert data.name == f"webnlg:{tmp_path}"


def test_files_in_folders_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    places = (
        "train/2triples/Airport",
        "train/1triples/City",
        "train/1triples/Airport",
        "dev/a/b/C",
    )
    for place in places:
        path = tmp_path / f"{place}.xml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(benchmark(entry(lex(place, comment="good"), triples=("a | b | c",))))
    (tmp_path / "train" / "README").write_text("no XML")
    data = sentences(tmp_path)
    assert texts_of(data) == sorted(places[:3])
    assert data.test.tokens.tolist() == [row("a : b : c", "dev/a/b/C")]


def test_only_english_texts_that_are_good_are_kept(tmp_path: Path) -> None:
    kept = [
        lex("plain"),
        lex("good", comment="good"),
        lex("English", lang="en", lid="Id3"),
        lex("empty", comment="", lang=""),
        lex("both", comment="good", lang="en"),
    ]
    left = [
        lex("bad", comment="toFix"),
        lex("хорошо", comment="good", lang="ru"),
        lex("also bad", comment="bad", lang="en"),
        lex("", comment="bad"),
    ]
    none = entry(*left, eid="Id9")
    data = sentences(write(tmp_path, benchmark(entry(*left, *kept), none)))
    assert texts_of(data) == ["plain", "good", "English", "empty", "both"]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "is not a whole XML file"),
        (SMALL[:-20], "is not a whole XML file"),
        (SMALL.replace("</lex>", "</lax>"), "is not a whole XML file .*mismatched tag"),
        (SMALL + SMALL, "is not a whole XML file"),
        (SMALL.replace("Fine", "&fine;"), "is not a whole XML file .*undefined entity"),
        (SMALL.encode("utf-16"), "holds a zero byte"),
        (SMALL.replace("å", "a").encode("utf-16-le"), "holds a zero byte"),
        (SMALL.encode().replace(b"Fine", b"F\xefne"), "is no UTF-8 text"),
        (SMALL.replace("benchmark", "html"), "holds no entries; expected <benchmark>"),
        (SMALL.replace("entries", "body"), "holds no entries; expected <benchmark><entries>"),
        (benchmark(), "holds no entries"),
        (SMALL.replace("modified", "original"), "entry Id1: expected triples .*found 0 and 1"),
        (benchmark(entry(eid="Id7")), "entry Id7: expected triples .*found 2 and 0"),
        (SMALL.replace("Fine.", "  "), "entry Id1: expected a text in <lex> Id1"),
        (SMALL.replace("Fine.", "<text>Fine.</text>"), "expected a text in <lex> Id1"),
        (SMALL.replace("Fine.", "Fine<b>.</b>"), "expected a text in <lex> Id1"),
        (SMALL.replace("| mayor |", "|  |"), r"found 'Aarhus \|  \| Jacob_Bundsgård'"),
        (SMALL.replace("Aarhus | mayor", "Aarhus"), r"found 'Aarhus \| Jacob_Bundsgård'"),
        (SMALL.replace("Aarhus | mayor", "A | b | mayor"), "entry Id1: expected 'subject | pred"),
        (SMALL.replace("Aarhus | mayor", " | mayor"), r"expected 'subject \| predicate \| object'"),
        (SMALL.replace('"good"', '"toFix"'), "holds no examples; expected English texts"),
        (SMALL.replace(' eid="Id1"', "").replace("Fine.", ""), "entry without an eid: expected"),
    ],
)
@pytest.mark.parametrize("part", ["train", "dev"])
def test_files_that_say_something_else_are_named(
    tmp_path: Path, part: str, content: str | bytes, found: str
) -> None:
    write(tmp_path, **{part: content})
    with pytest.raises(DataError, match=rf"(?s)/{part}\.xml.*{found}"):
        sentences(tmp_path)


BOMB = "".join(f'<!ENTITY b{n} "{f"&b{n - 1};" * 10}">' for n in range(1, 12))
TYPE = f'<!DOCTYPE benchmark [<!ENTITY b0 "bomb">{BOMB}]>'
OUTSIDE = '<!DOCTYPE benchmark [<!ENTITY b11 SYSTEM "file:///etc/passwd">]>'


def declaring(declared: str, encoding: str = "utf-8") -> bytes:
    head, _, rest = SMALL.partition("\n")
    text = declared + rest.replace("Fine", "&b11;")
    return head.replace("utf-8", encoding).encode() + text.encode(encoding)


@pytest.mark.parametrize(
    ("evil", "found"),
    [
        (declaring(TYPE), "declares a document type or entities"),
        (declaring(OUTSIDE), "declares a document type or entities"),
        (declaring("<!DOCTYPE benchmark>"), "declares a document type or entities"),
        (declaring("<!ENTITY a 'b'>"), "declares a document type or entities"),
        (declaring(TYPE, "cp037"), "is no UTF-8 text|is not a whole XML file"),
        (declaring(TYPE, "utf-16"), "holds a zero byte"),
        (TYPE.encode("utf-16-le"), "holds a zero byte"),  # by which parsers know what it is
        (TYPE.encode("utf-16-be"), "holds a zero byte"),
        (b" " * (64 * 10**6 + 1), "has more than 64000000 bytes"),
        (SMALL.replace("Fine", "x" * 60_000), "end within 50000 characters"),
        (SMALL.replace("<lex", f"<lex {'a' * 60_000}='b'"), "end within 50000 characters"),
        (SMALL.replace("<entries>", "<entries>" + "<a/>" * 20_000), "within 50000 characters"),
        ("<benchmark>" + "<entries>" * 20_000, "within 50000 characters"),
    ],
    ids=lambda each: None if isinstance(each, str) and len(each) < 80 else "evil",
)
def test_hostile_files_are_refused(tmp_path: Path, evil: str | bytes, found: str) -> None:
    write(tmp_path, evil)
    with pytest.raises(DataError, match=rf"train\.xml.*({found})"):
        sentences(tmp_path)


def test_what_a_file_says_of_its_characters_is_not_believed(tmp_path: Path) -> None:
    """It is UTF-8, as published: in no other code can anything be hidden from what looks for it."""
    content = SMALL.replace("utf-8", "iso-8859-1").replace("Fine", "Bundsgård")
    assert texts_of(sentences(write(tmp_path, content))) == ["Bundsgård."]
    assert texts_of(sentences(write(tmp_path, b"\xef\xbb\xbf" + SMALL.encode()))) == ["Fine."]


def test_what_has_been_read_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "train.xml").write_text(benchmark(*["<a/>" * 2_000 + entry(lex("Fine."))] * 40))
    tracemalloc.start()
    entries = webnlg._entries(tmp_path / "train.xml", tmp_path)
    held = [tracemalloc.get_traced_memory()[0] for _ in entries]
    tracemalloc.stop()
    assert len(held) == 40
    assert max(held[20:]) < 2 * min(held[:20])


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    elsewhere = write(tmp_path / "elsewhere")
    folder = write(tmp_path / "mine")
    (folder / "dev.xml").unlink()
    (folder / "dev.xml").symlink_to(elsewhere / "dev.xml")
    with pytest.raises(DataError, match=r"dev\.xml is a link out of"):
        sentences(folder)
    (folder / "dev.xml").unlink()
    (folder / "dev").symlink_to(elsewhere)
    with pytest.raises(DataError, match=r"dev/dev\.xml is a link out of"):
        sentences(folder)
    (folder / "dev").unlink()
    (folder / "dev.xml").symlink_to(folder / "train.xml")
    assert len(sentences(folder).test) == 1


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"asked for webnlg:.*no train\.xml in it, nor"):
        sentences(tmp_path / "nowhere")
    write(tmp_path)
    (tmp_path / "dev.xml").unlink()
    (tmp_path / "dev" / "1triples").mkdir(parents=True)
    with pytest.raises(DataError, match=r"no dev\.xml in it, nor \.xml files below a folder dev"):
        sentences(tmp_path)
    for name in ("a", "b"):
        bad = benchmark(entry(lex("плохо", lang="ru")))
        (tmp_path / "dev" / "1triples" / f"{name}.xml").write_text(bad)
    with pytest.raises(DataError, match="/dev holds no examples; expected English"):
        sentences(tmp_path)
    with pytest.raises(DataError, match=r"webnlg:.* with a context of 1; a row needs 2 tokens"):
        sentences(tmp_path, context=1)
    with pytest.raises(DataError, match="without saying where; give webnlg:PATH"):
        load_data("webnlg")
