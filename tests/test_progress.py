import io

from rich.console import Console

from jaxoverlap import progress


def shown(monkeypatch, terminal):
    out = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=out, force_terminal=terminal, width=100))
    with progress.bars() as report:
        for done in range(4):
            report("loading", done, 3)
            report("waiting", done, 0)
    return out.getvalue()


def test_a_terminal_sees_a_bar_for_each_label(monkeypatch):
    text = shown(monkeypatch, True)
    last = text[text.rindex("loading") :]
    assert "100%" in last[: last.index("waiting")]
    assert "%" not in last[last.index("waiting") :].replace("0%", "")


def test_a_pipe_sees_a_line_for_each_label(monkeypatch):
    assert shown(monkeypatch, False).split("\n") == ["loading ...", "waiting ...", ""]
