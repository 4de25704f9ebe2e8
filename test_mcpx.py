"""The tests of mcpx, in the sections of mcpx.py: pure parts first, real processes last.

    python3 -m pytest            everything
    python3 -m pytest -k wire    one section

The bad servers of the process tests are this file run again: `test_mcpx.py --role NAME`.
"""
from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import time

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
MCPX = os.path.join(HERE, "mcpx.py")
sys.path.insert(0, HERE)
import mcpx  # noqa: E402


# ---------------------------------------------------------------------------
# The file as a whole
# ---------------------------------------------------------------------------

def test_importing_the_file_has_no_side_effects(tmp_path):
    code = ("import sys, os, threading; before = set(os.listdir('/proc/self/fd')) if os.path.isdir('/proc/self/fd') "
            "else set(); import mcpx; after = set(os.listdir('/proc/self/fd')) if before else set(); "
            "assert before == after, (before, after); assert threading.active_count() == 1; "
            "assert sys.pycache_prefix is None; print('fine')")
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True,
                          env=dict(os.environ, HOME=str(tmp_path)))
    assert done.stdout == "fine\n" and not done.stderr, done.stderr
    assert os.listdir(str(tmp_path)) == []


def test_the_sections_stand_in_their_order():
    with open(MCPX, encoding="utf-8") as file:
        lines = file.read().split("\n")
    ruler = "# " + "-" * 75
    found = [lines[i + 1][2:].split(":")[0] for i, line in enumerate(lines)
             if line == ruler and i + 1 < len(lines) and ":" in lines[i + 1]]
    assert found == ["Constants", "Errors", "Wire", "Revisions", "Identity and scopes", "Settings and config", "Log",
                     "Platform", "Reactor", "Upstream", "Children", "Pool", "Surface", "Questions", "Host", "Daemon",
                     "Shim", "Demo", "Commands"]


@pytest.mark.parametrize("word, sections", [
    ("selectors.", {"Reactor"}), ("subprocess.Popen", {"Children", "Commands"}), ("os.kill(", {"Children"}),
    ("print(", {"Commands"}), ("argparse.", {"Commands"})])
def test_boundaries_between_sections_hold(word, sections):
    with open(MCPX, encoding="utf-8") as file:
        text = file.read()
    section, used = None, set()
    for before, line in zip([""] + text.split("\n"), text.split("\n")):
        if before == "# " + "-" * 75 and line.startswith("# ") and ":" in line:
            section = line[2:].split(":")[0]
        elif word in line.split("#")[0] and not line.lstrip().startswith('"'):
            used.add(section)
    assert used == sections


def test_only_the_standard_library_is_imported():
    import ast
    with open(MCPX, encoding="utf-8") as file:
        tree = ast.parse(file.read(), feature_version=(3, 9))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    names -= {"__future__"}
    assert all(name in sys.builtin_module_names or _is_standard(name) for name in names), names


def _is_standard(name):
    import importlib.util
    origin = importlib.util.find_spec(name).origin or ""
    return "site-packages" not in origin


def test_the_readme_has_the_settings_as_they_are():
    with open(os.path.join(HERE, "README.md"), encoding="utf-8") as file:
        text = file.read()
    for row in mcpx.SETTINGS.values():
        default = row.default if isinstance(row.default, str) else json.dumps(row.default)
        assert "| `%s` | `%s` | %s | %s |\n" % (
            row.name, default, "server" if row.per_server else "daemon", row.meaning) in text


# ---------------------------------------------------------------------------
# Wire
# ---------------------------------------------------------------------------

FRAMES = [b'{"a":1}', "{\"text\":\"né 漢字 🎉\"}".encode(), b"", b"x" * 5000, b'["\xff"]', b"\r", b"last"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 4096, 10 ** 6])
def test_wire_lines_are_the_same_however_the_stream_is_cut(size):
    stream = b"".join(frame + b"\n" for frame in FRAMES) + b"tail"
    buffer, lines = mcpx.LineBuffer(10 ** 6), []
    for start in range(0, len(stream), size):
        lines += buffer.feed(stream[start:start + size])
    assert lines == FRAMES
    assert buffer.rest() == b"tail" and buffer.rest() == b""


@pytest.mark.parametrize("size", [1, 10, 99, 10 ** 6])
def test_wire_a_line_over_the_limit_is_replaced_and_the_next_one_works(size):
    stream = b'{"id":7,' + b"x" * 200 + b"\n" + b"good\n" + b"y" * 101 + b"\n" + b"z" * 100 + b"\n"
    buffer, lines = mcpx.LineBuffer(100), []
    for start in range(0, len(stream), size):
        lines += buffer.feed(stream[start:start + size])
    assert [type(line).__name__ for line in lines] == ["Oversize", "bytes", "Oversize", "bytes"]
    assert lines[0].head.startswith(b'{"id":7,') and lines[0].size == 208
    assert lines[1] == b"good" and lines[3] == b"z" * 100


def test_wire_memory_stays_bounded_while_an_endless_line_arrives():
    buffer = mcpx.LineBuffer(1000)
    for _ in range(1000):
        assert buffer.feed(b"a" * 1000) == []
    assert buffer.partial == 10 ** 6
    assert sum(map(len, buffer._parts)) <= 1000


@pytest.mark.parametrize("data, code", [
    (b"{bad", -32700), (b"", -32700), (b'{"a":NaN}', -32700), (b'{"a":Infinity}', -32700), (b'"\xff"', -32700),
    (b'{"a":"\x00"}', -32700), (b"[" * 100000, -32700), (b'{"a":1}}', -32700), (b'"\xed\xa0\x80"', -32700)])
def test_wire_what_is_not_json_is_a_parse_error(data, code):
    with pytest.raises(mcpx.RpcError) as caught:
        mcpx.parse_json(data)
    assert caught.value.code == code


@pytest.mark.parametrize("message, kind", [
    ({"jsonrpc": "2.0", "id": 1, "method": "m"}, "request"),
    ({"jsonrpc": "2.0", "id": "", "method": "m", "params": {}}, "request"),
    ({"jsonrpc": "2.0", "method": "m"}, "notification"),
    ({"jsonrpc": "2.0", "id": 1, "result": {}}, "answer"),
    ({"jsonrpc": "2.0", "id": None, "error": {}}, "answer")])
def test_wire_kinds(message, kind):
    assert mcpx.message_kind(message) == kind


@pytest.mark.parametrize("message", [
    42, "ok", [], None, {}, {"a": 1}, {"jsonrpc": "2.0"}, {"jsonrpc": "1.0", "id": 1, "method": "m"},
    {"jsonrpc": "2.0", "id": 1, "method": 5}, {"jsonrpc": "2.0", "id": 1.5, "method": "m"},
    {"jsonrpc": "2.0", "id": None, "method": "m"}, {"jsonrpc": "2.0", "id": True, "method": "m"},
    {"jsonrpc": "2.0", "id": [1], "method": "m"}, {"jsonrpc": "2.0", "id": 1, "method": "m", "params": [1]},
    {"jsonrpc": "2.0", "result": {}}])
def test_wire_what_is_json_but_no_message_is_an_invalid_request(message):
    with pytest.raises(mcpx.RpcError) as caught:
        mcpx.message_kind(message)
    assert caught.value.code == -32600


ID_LINES = [
    b'{"jsonrpc":"2.0","id":5,"result":{"n":1.0,"e":1e2,"big":123456789012345678901234567890}}',
    b'{"result":{"content":[{"type":"text","text":"say \\"id\\":5,"}]},"jsonrpc":"2.0","id":5}',
    b'{"id" : 5 , "jsonrpc":"2.0","result":{}}',
    b'{"jsonrpc":"2.0","id":5,"result":{"id":5,"list":[{"id":5}]}}',
    b'{"result":{"id":6},"id":5,"jsonrpc":"2.0"}',
    b'{"jsonrpc":"2.0","\\u0069d":5,"result":{"id":5}}',
    b'{"jsonrpc":"2.0","result":{"a":"\\ud800"},"id":5}',
    b'\xef\xbb\xbf{"jsonrpc":"2.0","id":5,"result":{}}',
    b'{"jsonrpc":"2.0","id":5,"result":{"text":"\\\\\\"id\\":5"}}',
    b'{"jsonrpc":"2.0","result":"\\"","id":5}',
]


@pytest.mark.parametrize("line", ID_LINES)
@pytest.mark.parametrize("new_id", [1, "x", 'quote"d', "\u00e9", -3])
def test_wire_an_id_is_replaced_and_nothing_else(line, new_id):
    message = mcpx.parse_json(line)
    replaced = mcpx.parse_json(mcpx.with_id(line, message, new_id))
    assert replaced == dict(message, id=new_id)


def test_wire_replacing_an_id_keeps_the_spelling_of_numbers():
    line = ID_LINES[0]
    assert mcpx.with_id(line, mcpx.parse_json(line), 9) == line.replace(b'"id":5', b'"id":9')


def test_wire_a_lone_surrogate_leaves_as_the_escape_it_came_as():
    value = mcpx.parse_json(b'{"a":"\\ud800 \xc3\xa9"}')
    assert json.loads(mcpx.encode_json(value)) == value


@pytest.mark.parametrize("head, expected", [
    (b'{"jsonrpc":"2.0","id":12,"method":"x","par', 12), (b'{"jsonrpc":"2.0","method":"x","id":"a","p', "a"),
    (b'{"id":3,', 3), (b'{"params":{"id":3,', None), (b"garbage", None), (b'{"jsonrpc":"2.0","id":1', None)])
def test_wire_the_id_of_an_unreadable_line_is_told_only_where_it_is_plain(head, expected):
    assert mcpx.guess_id(head) == expected


# ---------------------------------------------------------------------------
# Revisions
# ---------------------------------------------------------------------------

NEWEST_TOOL = {
    "name": "t", "title": "T", "description": "d", "icons": [{"src": "data:,"}],
    "inputSchema": {"type": "object", "$schema": "x"}, "outputSchema": {"type": "object"},
    "annotations": {"readOnlyHint": True}, "execution": {"taskSupport": "optional"}, "_meta": {"k": 1}, "vendor": 1}
TOOL_MEMBERS = {
    "2024-11-05": {"name", "description", "inputSchema", "vendor"},
    "2025-03-26": {"name", "description", "inputSchema", "annotations", "vendor"},
    "2025-06-18": {"name", "title", "description", "inputSchema", "outputSchema", "annotations", "_meta", "vendor"},
    "2025-11-25": set(NEWEST_TOOL),
    "2026-07-28": set(NEWEST_TOOL) - {"execution"}}


@pytest.mark.parametrize("revision", mcpx.REVISIONS)
def test_revisions_a_tool_has_what_its_revision_defines(revision):
    before = json.dumps(NEWEST_TOOL)
    spelled = mcpx.spell_result("tools/list", {"tools": [NEWEST_TOOL]}, revision)["tools"][0]
    assert set(spelled) == TOOL_MEMBERS[revision]
    assert json.dumps(NEWEST_TOOL) == before, "a stored value was edited"
    if revision == "2025-03-26":
        assert spelled["annotations"] == {"readOnlyHint": True, "title": "T"}


@pytest.mark.parametrize("revision", mcpx.REVISIONS)
@pytest.mark.parametrize("type_name", sorted(mcpx.TYPES))
def test_revisions_every_row_of_the_table_is_obeyed(type_name, revision):
    """Each member of each type is dropped exactly where its revision lacks it."""
    rank = mcpx.RANK[revision]
    for member, (first, last, inner) in mcpx.TYPES[type_name].items():
        assert mcpx.R24 <= first <= last <= mcpx.RM
        assert inner is None or (inner[0] if isinstance(inner, list) else inner) in mcpx.TYPES
        value = [] if isinstance(inner, list) else {}
        if member == "structuredContent":
            value = {"a": 1}
        elif member == "outputSchema":
            value = {"type": "object"}
        spelled = mcpx.spell(type_name, {member: value}, rank)
        assert (member in spelled) == (first <= rank <= last), member


def test_revisions_the_same_object_comes_back_where_nothing_changes():
    result = {"content": [{"type": "text", "text": "x"}], "structuredContent": {"a": 1}}
    assert mcpx.spell_result("tools/call", result, "2025-11-25") is result
    assert mcpx.spell_result("tools/call", result, "2025-06-18") is result


@pytest.mark.parametrize("revision, kinds", [
    ("2024-11-05", ["text", "resource", "text"]), ("2025-03-26", ["text", "audio", "text"]),
    ("2025-06-18", ["text", "audio", "resource_link"]), ("2025-11-25", ["text", "audio", "resource_link"])])
def test_revisions_content_of_newer_kinds_becomes_content_that_is_known(revision, kinds):
    result = {"content": [{"type": "text", "text": "x", "_meta": {}},
                          {"type": "audio", "data": "AA==", "mimeType": "audio/wav"},
                          {"type": "resource_link", "uri": "file:///a", "name": "a", "title": "A", "icons": []}]}
    spelled = mcpx.spell_result("tools/call", result, revision)["content"]
    assert [block["type"] for block in spelled] == kinds
    assert ("_meta" in spelled[0]) == (revision >= "2025-06-18")
    assert ("icons" in spelled[2]) == (revision >= "2025-11-25")
    if revision == "2024-11-05":
        assert spelled[1]["resource"]["blob"] == "AA=="
    if kinds[2] == "text":
        assert "file:///a" in spelled[2]["text"]


@pytest.mark.parametrize("content, added", [([], True), ([{"type": "image", "data": "", "mimeType": "i"}], True),
                                            ([{"type": "text", "text": "have"}], False)])
def test_revisions_structured_content_stays_readable_for_older_hosts(content, added):
    spelled = mcpx.spell_result("tools/call", {"content": content, "structuredContent": {"n": 1}}, "2025-03-26")
    assert "structuredContent" not in spelled
    texts = [block["text"] for block in spelled["content"] if block["type"] == "text"]
    assert ('{"n":1}' in texts) == added


def test_revisions_a_form_for_an_older_host_is_plain():
    schema = {"$schema": "x", "type": "object", "properties": {
        "s": {"type": "string", "default": "d"}, "b": {"type": "boolean", "default": True},
        "e": {"type": "string", "oneOf": [{"const": "a", "title": "A"}]}}}
    params = {"mode": "form", "message": "m", "requestedSchema": schema}
    spelled = mcpx.spell_params("elicitation/create", params, "2025-06-18")
    assert spelled == {"message": "m", "requestedSchema": {"type": "object", "properties": {
        "s": {"type": "string"}, "b": {"type": "boolean", "default": True},
        "e": {"type": "string", "enum": ["a"], "enumNames": ["A"]}}}}
    assert mcpx.spell_params("elicitation/create", params, "2025-11-25") is params


@pytest.mark.parametrize("method, params, revision, code", [
    ("elicitation/create", {"mode": "url"}, "2025-06-18", -32602),
    ("elicitation/create", {"requestedSchema": {"properties": {"a": {"type": "array"}}}}, "2025-06-18", -32602),
    ("elicitation/create", {}, "2025-03-26", -32601),
    ("sampling/createMessage", {"messages": [{"content": {"type": "audio"}}]}, "2024-11-05", -32602),
    ("sampling/createMessage", {"tools": [{}]}, "2025-06-18", -32602)])
def test_revisions_what_cannot_be_shown_is_refused(method, params, revision, code):
    assert mcpx.refusal_of_question(method, params, revision).code == code
    assert mcpx.refusal_of_question(method, params, "2025-11-25") is None


@pytest.mark.parametrize("asked, given", [(r, r) for r in mcpx.LEGACY_REVISIONS] + [
    ("2026-07-28", "2025-11-25"), ("2099-01-01", "2025-11-25"), ("1.0", "2025-11-25")])
def test_revisions_negotiation(asked, given):
    assert mcpx.negotiate(asked) == given


@pytest.mark.parametrize("capabilities, method, params, good", [
    ({}, "roots/list", {}, False), ({"roots": {}}, "roots/list", {}, True),
    ({"elicitation": {}}, "elicitation/create", {}, True), ({"elicitation": {}}, "elicitation/create", {"mode": "url"}, False),
    ({"elicitation": {"url": {}}}, "elicitation/create", {"mode": "url"}, True),
    ({"elicitation": {"url": {}}}, "elicitation/create", {}, False),
    ({"sampling": {}}, "sampling/createMessage", {}, True),
    ({"sampling": {}}, "sampling/createMessage", {"tools": [{}]}, False),
    ({"sampling": {"tools": {}}}, "sampling/createMessage", {"tools": [{}]}, True)])
def test_revisions_whether_a_host_can_be_asked(capabilities, method, params, good):
    assert mcpx.covers(capabilities, method, params) is good


def test_revisions_nothing_is_declared_upstream_that_the_host_did_not_declare():
    everything = {"roots": {"listChanged": True}, "sampling": {}, "elicitation": {"url": {}}, "tasks": {}, "odd": 1}
    for size in range(len(everything) + 1):
        for names in itertools.combinations(everything, size):
            host = {name: everything[name] for name in names}
            for confined in (True, False):
                told = mcpx.declared_capabilities(host, "2025-11-25", confined)
                assert set(told) <= set(host)
                assert ("roots" in told) == ("roots" in host and confined)


def test_revisions_hop_keys_are_taken_out_and_all_others_pass():
    meta = {"progressToken": 1, "traceparent": "x", "io.modelcontextprotocol/clientInfo": {}, "vendor/x": {"a": [1]}}
    params = {"name": "t", "_meta": meta}
    assert mcpx.strip_hop_meta(params)["_meta"] == {"progressToken": 1, "traceparent": "x", "vendor/x": {"a": [1]}}
    assert "io.modelcontextprotocol/clientInfo" in meta


# ---------------------------------------------------------------------------
# Identity and scopes
# ---------------------------------------------------------------------------

@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    """A clone with linked work trees, a submodule, a bare repository with a work tree, made by git."""
    root = tmp_path_factory.mktemp("git")
    env = {"PATH": os.environ["PATH"], "HOME": str(root), "GIT_CONFIG_GLOBAL": os.devnull,
           "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}

    def git(directory, *arguments):
        subprocess.run(("git", "-c", "protocol.file.allow=always", "-c", "init.defaultBranch=main") + arguments,
                       cwd=str(directory), env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for name in ("main", "library"):
        (root / name / "sub").mkdir(parents=True)
        git(root / name, "init")
        git(root / name, "commit", "--allow-empty", "-m", "x")
    git(root / "main", "worktree", "add", "../linked")
    git(root / "main", "worktree", "add", "inside")
    git(root / "main", "submodule", "add", "../library", "module")
    git(root, "clone", "--bare", "main", "bare.git")
    git(root / "bare.git", "worktree", "add", "../from-bare", "HEAD")
    (root / "link").symlink_to(root / "linked")
    (root / "plain").mkdir()
    (root / "liar").mkdir()
    (root / "liar" / ".git").write_text("gitdir: %s\n" % (root / "main" / ".git" / "worktrees" / "linked"))
    return root


@pytest.mark.parametrize("where, worktree, repo", [
    ("main", "main", "main/.git"), ("main/sub", "main", "main/.git"), ("linked", "linked", "main/.git"),
    ("link", "linked", "main/.git"), ("main/inside", "main/inside", "main/.git"),
    ("main/module", "main/module", "main/.git/modules/module"), ("bare.git", None, "bare.git"),
    ("from-bare", "from-bare", "bare.git"), ("plain", None, None), ("liar", None, None),
    ("main/.git", None, "main/.git")])
def test_identity_work_trees_and_repositories_are_told_without_git(repositories, where, worktree, repo, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("GIT_DIR", str(repositories / "main" / ".git"))
    place = mcpx.find_place(str(repositories / where))
    real = os.path.realpath(str(repositories))
    assert place.cwd == os.path.realpath(str(repositories / where))
    assert place.worktree == (os.path.join(real, worktree) if worktree else None)
    assert place.repo == (os.path.join(real, repo) if repo else None)


def test_identity_a_deleted_or_relative_directory_is_unknown(tmp_path):
    gone = tmp_path / "gone"
    for path in (str(gone), "relative", "", "/proc/nothing\0here", 5):
        assert mcpx.find_place(path).cwd is None


def test_identity_places_where_programs_start_are_not_where_work_is(tmp_path):
    assert mcpx.find_place("/").cwd is None
    assert mcpx.find_place("/tmp").cwd is None
    assert mcpx.find_place(str(tmp_path), (str(tmp_path),)).cwd is None
    assert mcpx.find_place(str(tmp_path)).cwd == os.path.realpath(str(tmp_path))


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything, so nothing can be made unreadable for it")
def test_identity_a_forbidden_git_directory_is_cannot_be_told(tmp_path):
    (tmp_path / ".git").mkdir(mode=0o000)
    place = mcpx.find_place(str(tmp_path))
    assert place.cwd and place.repo is None and "cannot be told" in place.reason


KEYS = ("dev.mcpx/session", "ai.opencode/sessionID")


@pytest.mark.parametrize("meta, keys, session, source", [
    ({}, KEYS, "mcp-1", "process"), ({"dev.mcpx/session": "a"}, KEYS, "a", "named"),
    ({"ai.opencode/sessionID": "b"}, KEYS, "b", "named"),
    ({"ai.opencode/sessionID": "b", "dev.mcpx/session": "a"}, KEYS, "a", "named"),
    ({"ai.opencode/sessionID": "b", "dev.mcpx/session": "a"}, KEYS[::-1], "b", "named"),
    ({"dev.mcpx/session": ""}, KEYS, "mcp-1", "process"), ({"dev.mcpx/session": 5}, KEYS, "mcp-1", "process"),
    ({"dev.mcpx/session": None, "ai.opencode/sessionID": "b"}, KEYS, "b", "named"),
    ({"sessionID": "c"}, KEYS, "mcp-1", "process"), ({"sessionID": "c"}, ("sessionID",), "c", "named"),
    ({"dev.mcpx/session": "a"}, (), "mcp-1", "process")])
def test_identity_the_first_good_key_names_the_session(meta, keys, session, source):
    base = mcpx.Identity("process", "mcp-1", pid=1, started="0")
    identity = base.with_meta(meta, keys, 77)
    assert (identity.session, identity.source, identity.call) == (session, source, 77)
    assert identity.named == (source == "named")


@pytest.mark.parametrize("name", ["x" * 257, "a\nb", "\x1b[31m", "mcp-1"])
def test_identity_names_that_nobody_may_use_are_refused(name):
    with pytest.raises(mcpx.RpcError) as caught:
        mcpx.Identity("process", "mcp-1").with_meta({"dev.mcpx/session": name}, KEYS, 1)
    assert caught.value.code == -32602


def test_identity_a_named_session_does_not_inherit_the_connections_parent():
    base = mcpx.Identity("process", "own", True, parent="P")
    assert mcpx.scope_key("parent-session", base.with_meta({}, KEYS, 1)).text == "session:P"
    named = base.with_meta({"dev.mcpx/session": "other"}, KEYS, 1)
    assert mcpx.scope_key("parent-session", named).text == "session:other"
    both = base.with_meta({"dev.mcpx/session": "other", "dev.mcpx/parent-session": "Q"}, KEYS, 1)
    assert mcpx.scope_key("parent-session", both).text == "session:Q"


FULL = dict(session="s", parent="p", place=mcpx.Place("/w/sub", "/w", "/r/.git", None), pid=9, started="55", call=3)
SCOPE_TABLE = {
    # scope: (everything known, no repository, no directory, nothing known)
    "global": ("global", "global", "global", "global"),
    "repo": ("repo:/r/.git", "cwd:/w/sub", "call:3", "call:3"),
    "worktree": ("worktree:/w", "cwd:/w/sub", "call:3", "call:3"),
    "cwd": ("cwd:/w/sub", "cwd:/w/sub", "call:3", "call:3"),
    "session": ("session:s", "session:s", "session:s", "call:3"),
    "parent-session": ("session:p", "session:p", "session:p", "call:3"),
    "pid": ("pid:9@55", "pid:9@55", "pid:9@55", "call:3"),
    "call": ("call:3", "call:3", "call:3", "call:3")}


@pytest.mark.parametrize("scope", mcpx.SCOPES)
def test_scopes_degrade_only_towards_call(scope):
    identities = [mcpx.Identity("process", **FULL),
                  mcpx.Identity("process", **dict(FULL, place=mcpx.Place("/w/sub", None, None, "not a repository"))),
                  mcpx.Identity("process", **dict(FULL, place=None)), mcpx.Identity("process", call=3)]
    keys = [mcpx.scope_key(scope, identity) for identity in identities]
    assert tuple(key.text for key in keys) == SCOPE_TABLE[scope]
    for key in keys:
        expected_kind = {"parent-session": "session"}.get(scope, scope)
        assert bool(key.degraded) == (key.text.split(":")[0] != expected_kind)


def test_scopes_a_session_without_parent_meets_its_sub_sessions():
    parent = mcpx.Identity("process", "p", True, call=1)
    child = mcpx.Identity("process", "c", True, parent="p", call=2)
    assert mcpx.scope_key("parent-session", parent).text == mcpx.scope_key("parent-session", child).text


# ---------------------------------------------------------------------------
# Settings and config
# ---------------------------------------------------------------------------

@pytest.mark.parametrize("name", sorted(mcpx.SETTINGS))
def test_settings_every_default_is_valid_and_explained(name):
    row = mcpx.SETTINGS[name]
    mcpx.parse_setting(row, row.default)
    assert row.meaning and row.name == name


@pytest.mark.parametrize("name, text, value", [
    ("idleTimeout", "500ms", 0.5), ("idleTimeout", "2s", 2), ("idleTimeout", "15m", 900), ("idleTimeout", "1h", 3600),
    ("idleTimeout", 3, 3), ("idleTimeout", 0.25, 0.25), ("limits.lineBytes", "64MiB", 64 << 20),
    ("limits.lineBytes", 1000, 1000), ("max", 3, 3), ("scope", "global", "global")])
def test_settings_values_are_read_in_their_unit(name, text, value):
    assert mcpx.parse_setting(mcpx.SETTINGS[name], text) == value


@pytest.mark.parametrize("name, text", [
    ("idleTimeout", "soon"), ("idleTimeout", -1), ("idleTimeout", True), ("idleTimeout", [1]), ("max", 1.5), ("max", -1),
    ("scope", "globl"), ("inheritEnv", "PATH"), ("inheritEnv", [1]), ("limits.lineBytes", "1parsec"), ("envFile", 1)])
def test_settings_bad_values_are_refused(name, text):
    with pytest.raises(ValueError):
        mcpx.parse_setting(mcpx.SETTINGS[name], text)


CONFIG = """{
  // servers
  "mcpServers": {
    "one": {"command": "one", "args": ["a // no comment", "b,]"], /* both
       kinds */ "mcpx": {"scope": "cwd"},},
    "two": {"command": ["two", "x"], "environment": {"K": "v"}, "enabled": false, "autoApprove": []},
  },
  "mcpx": {"maxInstances": 3, "stop": {"eofGrace": "1s"}, "idleTimeout": "9s",},
}"""


def build(text, path="/c/config.json"):
    return mcpx.build_config(mcpx.parse_config_text(text, path), path, text)


def test_config_comments_trailing_commas_and_dialects_are_understood():
    config = build("\ufeff" + CONFIG)
    one, two = config.servers["one"], config.servers["two"]
    assert one.args == ["a // no comment", "b,]"] and config.get("scope", one) == "cwd"
    assert (two.command, two.args, two.env, two.disabled) == ("two", ["x"], {"K": "v"}, True)
    assert config.get("maxInstances") == 3 and config.get("stop.eofGrace") == 1 and config.get("idleTimeout", two) == 9
    assert config.get("scope", two) == "session" and "autoApprove" in config.notes[0]


@pytest.mark.parametrize("text, words", [
    ('{"mcpServers": {\n"a": {"command": "x" "y"}}}', ["line 2", "not valid JSON"]),
    ('{"mcpx": {\n\n"maxInstance": 3}}', ["line 3", "maxInstance", "did you mean maxInstances"]),
    ('{"mcpx": {"maxInstances": "many"}}', ["maxInstances", "whole number"]),
    ('{"mcpServers": {"a": {"command": "x"}, "a": {"command": "y"}}}', ["a", "twice"]),
    ('[]', ["one object"]), ('{"mcpServers": []}', ["takes an object"]), ('', ["not valid JSON"])])
def test_config_an_error_names_file_line_and_key(text, words):
    with pytest.raises(mcpx.ConfigError) as caught:
        build(text)
    for word in ["/c/config.json"] + words:
        assert word in str(caught.value)


@pytest.mark.parametrize("entry, words", [
    ({}, ["neither command nor url"]), ({"command": "x", "mcpx": {"scope": "globl"}}, ["scope", "takes one of"]),
    ({"command": "x", "mcpx": {"maxInstances": 1}}, ["whole daemon"]), ({"command": "x", "args": "y"}, ["args", "a list"]),
    ({"command": "x", "args": [1]}, ["strings"]), ("x", ["takes an object"]), ({"url": "http://x"}, ["url"])])
def test_config_a_mistake_in_one_server_breaks_that_one_alone(entry, words):
    config = build(json.dumps({"mcpServers": {"bad": entry, "good": {"command": "x"}}}))
    assert config.servers["good"].broken is None
    for word in words:
        assert word in config.servers["bad"].broken


@pytest.mark.parametrize("text, expected", [
    ("${A}", "1"), ("x${A}y${B:-z}", "1".join(["x", "yz"])), ("${EMPTY:-d}", "d"), ("${EMPTY}", ""), ("{env:A}", "1"),
    ("${env:A}", "1"), ("$A costs $5 {x}", "$A costs $5 {x}"), ("${A", "${A")])
def test_config_variables(text, expected):
    assert mcpx.expand_variables(text, {"A": "1", "EMPTY": ""}) == expected


def test_config_a_variable_that_is_not_set_is_named():
    with pytest.raises(mcpx.StartFailed) as caught:
        mcpx.expand_variables("${NOT_THERE}", {})
    assert "NOT_THERE" in caught.value.message


def define(entry, env=None, key="session:s", identity=None, settings=None):
    config = build(json.dumps({"mcpServers": {"s": entry}, "mcpx": settings or {}}))
    identity = identity or mcpx.Identity("process", "s", True, place=mcpx.Place("/work", None, None, "x"), call=1)
    return mcpx.Definition(config, config.servers["s"], identity, mcpx.Key(key), env or {"PATH": "/bin"}, b"k" * 32)


def test_config_two_callers_with_different_tokens_have_different_definitions():
    entry = {"command": "x", "env": {"TOKEN": "${TOKEN}"}}
    a, b = (define(entry, {"TOKEN": token, "PATH": "/bin"}) for token in "ab")
    assert a.digest != b.digest and a.shape != b.shape and "a" not in (a.digest,)


@pytest.mark.parametrize("one, two, same", [
    ({"command": "x", "env": {"A": "1", "B": "2"}}, {"command": "x", "env": {"B": "2", "A": "1"}}, True),
    ({"command": "x", "args": ["1"]}, {"command": "x", "args": ["2"]}, False),
    ({"command": "x"}, {"command": "y"}, False), ({"command": "x", "cwd": "/a"}, {"command": "x", "cwd": "/b"}, False),
    ({"command": "x", "args": ["{tmpdir}", "{port}", "{id}"]}, {"command": "x", "args": ["{tmpdir}", "{port}", "{id}"]}, True)])
def test_config_what_makes_a_definition_another(one, two, same):
    assert (define(one).digest == define(two).digest) is same


def test_config_inherited_variables_split_the_pool_and_others_do_not():
    entry = {"command": "x", "mcpx": {"inheritEnv": ["AWS_PROFILE"]}}
    digests = [define(entry, dict({"PATH": "/bin"}, **extra)).digest
               for extra in ({"AWS_PROFILE": "a"}, {"AWS_PROFILE": "b"}, {"AWS_PROFILE": "a", "LANG": "C"})]
    assert digests[0] != digests[1] and digests[0] == digests[2]


def test_config_shared_scopes_get_the_base_environment_and_private_ones_the_callers():
    env = {"PATH": "/bin", "HOME": "/h", "SECRET_TOKEN": "x", "LC_ALL": "C", "EXTRA": "e"}
    private = define({"command": "x", "mcpx": {"scope": "session"}}, env)
    shared = define({"command": "x", "env": {"OWN": "1"}, "mcpx": {"scope": "global", "inheritEnv": ["EXTRA"]}}, env, "global")
    assert private.env == env
    assert shared.env == {"PATH": "/bin", "HOME": "/h", "LC_ALL": "C", "EXTRA": "e", "OWN": "1"}


def test_config_what_a_caller_names_is_safe_as_a_file_name():
    identity = mcpx.Identity("process", "../../etc/passwd", True, place=mcpx.Place("/work", None, None, "x"), call=1)
    definition = define({"command": "x", "args": ["/p/{session}", "{cwd}", "/k/{key}"]}, key="session:../x", identity=identity)
    assert "/.." not in definition.argv[1] and definition.argv[1].count("/") == 2
    assert definition.argv[2] == "/work" and definition.argv[3].count("/") == 2


def test_config_safe_names_differ_where_the_names_differ():
    names = ["a/b", "a_b", "a.b", "a b", ".a", "a", "A", "ä", ""]
    assert len({mcpx.safe_file_name(name) for name in names}) == len(names)
    assert all("/" not in mcpx.safe_file_name(name) and mcpx.safe_file_name(name) for name in names)


def test_config_a_placeholder_that_cannot_be_told_is_an_error_with_advice():
    identity = mcpx.Identity("process", None, call=1)
    with pytest.raises(mcpx.StartFailed) as caught:
        define({"command": "x", "args": ["{cwd}"]}, key="call:1", identity=identity)
    assert "{cwd}" in caught.value.message


def test_config_relative_commands_are_relative_to_the_file_and_plain_ones_are_not():
    assert define({"command": "./bin/x"}).argv[0] == "/c/bin/x"
    assert define({"command": "bin/x"}).argv[0] == "/c/bin/x"
    assert define({"command": "x"}).argv[0] == "x"


def test_config_secrets_are_masked_wherever_it_is_shown():
    value = {"mcpServers": {"a": {"env": {"K": "canary"}, "headers": {"H": "canary"}, "args": ["--token=canary"]}}}
    assert "canary" not in json.dumps(mcpx.masked(value))


def test_config_the_socket_path_is_always_short_enough(tmp_path):
    for length in (10, 60, 95, 103, 107, 200):
        runtime = tmp_path / ("é" * (length // 2))
        path = mcpx.socket_path("/c", {"XDG_RUNTIME_DIR": str(runtime), "TMPDIR": "/tmp/" + "x" * length})
        assert len(os.fsencode(path)) <= mcpx.MAX_SOCKET_PATH


# ---------------------------------------------------------------------------
# Log
# ---------------------------------------------------------------------------

def test_log_files_are_bounded_rotated_and_private(tmp_path):
    sink = mcpx.RotatedFile(str(tmp_path / "logs" / "x.log"), 1000, 3)
    for number in range(200):
        sink.write(b"%050d\n" % number)
    files = sorted(os.listdir(str(tmp_path / "logs")))
    assert files == ["x.log", "x.log.1", "x.log.2"]
    for name in files:
        info = os.stat(str(tmp_path / "logs" / name))
        assert info.st_size <= 1000 and info.st_mode & 0o777 == 0o600
    os.unlink(str(tmp_path / "logs" / "x.log"))
    sink._checked_at = -10
    sink.write(b"after\n")
    assert (tmp_path / "logs" / "x.log").read_bytes() == b"after\n"


def test_log_repeats_are_folded_and_escapes_cannot_steer_a_terminal(tmp_path):
    log = mcpx.Log(mcpx.RotatedFile(str(tmp_path / "l"), 10 ** 6, 1))
    for _ in range(50):
        log.info("same %s", "\x1b[2Jx\n")
    log.info("other")
    lines = (tmp_path / "l").read_text().splitlines()
    assert len(lines) == 3 and "49 more times" in lines[1] and "\x1b" not in lines[0]


def test_log_a_full_or_missing_disk_does_not_raise():
    sink = mcpx.RotatedFile("/dev/full", 10 ** 6, 1)
    sink.write(b"x")
    mcpx.RotatedFile("/proc/nowhere/x.log", 10, 1).write(b"x")


# ---------------------------------------------------------------------------
# Reactor
# ---------------------------------------------------------------------------

@pytest.fixture
def loop():
    made = mcpx.Loop(mcpx.Log())
    yield made
    made.close()


def turn_until(loop, condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the loop did not get there"
        loop.turn(0.05)


def pair(loop, limit=10 ** 6):
    """Two ends of ours joined back to back: (stream, its lines, its end, the raw other end)."""
    import socket
    ours, other = socket.socketpair()
    lines, ends = [], []
    fd = ours.detach()
    stream = mcpx.Stream(loop, fd, fd, limit, lines.extend, ends.append, lambda rest: lines.append(rest))
    return stream, lines, ends, other


def test_reactor_timers_come_in_order_and_cancelled_ones_do_not(loop):
    seen = []
    loop.call_later(0.02, lambda: seen.append("b"))
    loop.call_later(0.01, lambda: seen.append("a"))
    loop.call_later(0.0, lambda: seen.append("never")).cancel()
    turn_until(loop, lambda: seen == ["a", "b"])


def test_reactor_a_mistake_in_one_callback_does_not_end_the_loop(loop, tmp_path):
    loop.log = mcpx.Log(mcpx.RotatedFile(str(tmp_path / "l"), 10 ** 6, 1))
    seen = []
    loop.soon(lambda: 1 / 0)
    loop.soon(lambda: seen.append(True))
    loop.turn(0)
    assert seen and "ZeroDivisionError" in (tmp_path / "l").read_text()


def test_reactor_lines_cut_anywhere_arrive_whole_and_the_rest_at_the_end(loop):
    _, lines, ends, other = pair(loop)
    for byte in b"one\ntwo\nthr":
        other.send(bytes([byte]))
        loop.turn(0)
    other.close()
    turn_until(loop, lambda: ends)
    assert lines == [b"one", b"two", b"thr"] and ends == ["end of stream"]


def test_reactor_a_peer_that_does_not_read_blocks_nobody(loop):
    stream, _, _, other = pair(loop)
    _, lines, _, second = pair(loop)
    stream.write(b"x" * (8 << 20) + b"\n")
    second.send(b"hello\n")
    turn_until(loop, lambda: lines == [b"hello"])
    assert stream.queued_bytes > 0
    received = 0
    while received < (8 << 20) + 1:
        loop.turn(0)
        received += len(other.recv(1 << 20))
    turn_until(loop, lambda: stream.queued_bytes == 0)
    other.close()
    second.close()


def test_reactor_many_small_messages_keep_their_order_under_a_slow_reader(loop):
    stream, _, _, other = pair(loop)
    expected = b"".join(b"%d\n" % n for n in range(100000))
    for n in range(100000):
        stream.write(b"%d\n" % n)
    data = b""
    while len(data) < len(expected):
        loop.turn(0)
        data += other.recv(1000 if len(data) < 50000 else 1 << 20)
    assert data == expected
    other.close()


def test_reactor_closing_happens_at_the_end_of_the_turn_and_once(loop):
    stream, _, ends, other = pair(loop)
    loop.soon(lambda: (stream.close("a"), stream.close("b"), stream.write(b"dropped"), ends.append("still valid")))
    loop.turn(0)
    loop.turn(0)
    assert ends == ["still valid", "a"]
    other.close()


def test_reactor_exit_statuses_reach_their_own_callback(loop):
    seen = {}
    for status in (0, 3, 7):
        process = subprocess.Popen([sys.executable, "-c", "import os; os._exit(%d)" % status])
        process.returncode = 0
        loop.on_exit(process.pid, lambda code, status=status: seen.__setitem__(status, mcpx.describe_status(code)))
    turn_until(loop, lambda: len(seen) == 3, 20)
    assert seen == {0: "exit status 0", 3: "exit status 3", 7: "exit status 7"}


def test_reactor_a_thread_that_hangs_is_given_up_and_its_late_result_dropped(loop):
    import threading
    gate, seen = threading.Event(), []
    loop.in_thread(lambda: gate.wait(5), lambda value, error: seen.append(error), 0.02)
    turn_until(loop, lambda: seen)
    assert isinstance(seen[0], TimeoutError)
    gate.set()
    loop.in_thread(lambda: "done", lambda value, error: seen.append(value), 5)
    turn_until(loop, lambda: len(seen) == 2)
    assert seen[1] == "done"


# ---------------------------------------------------------------------------
# Upstream
# ---------------------------------------------------------------------------

class FakeStream:
    """Takes what an Upstream writes; `say` feeds it what a server would."""

    def __init__(self):
        self.sent, self.lines = [], mcpx.LineBuffer(10 ** 6)

    def write(self, data):
        self.sent.append(json.loads(data))


class Recorder:
    """An owner of an Upstream, or a host of a call: writes down what it is told."""

    def __init__(self):
        self.events = []

    def __getattr__(self, name):
        return lambda *arguments: self.events.append((name,) + arguments)


@pytest.fixture
def upstream():
    import collections
    stream, owner = FakeStream(), Recorder()
    made = mcpx.Upstream(stream, owner, collections.Counter())
    made.say = lambda *messages: made.on_lines([json.dumps(m).encode() if isinstance(m, dict) else m for m in messages])
    return made


def call(answers, method="tools/call", **more):
    made = mcpx.Call(method, {"name": "t"}, lambda c, message, line: answers.append(message), Recorder(), **more)
    return made


def test_upstream_answers_find_their_call_whatever_the_order(upstream):
    answers = [[], [], []]
    for box in answers:
        upstream.send(call(box))
    for wire_id in (2, 3, 1):
        upstream.say({"jsonrpc": "2.0", "id": wire_id, "result": {"n": wire_id}})
    assert [box[0]["result"]["n"] for box in answers] == [1, 2, 3]
    assert not upstream.in_flight


def test_upstream_late_doubled_and_foreign_answers_are_counted_and_dropped(upstream):
    box = []
    upstream.send(call(box))
    for wire_id in (1, 1, 99, "1", 1.0, None):
        upstream.say({"jsonrpc": "2.0", "id": wire_id, "result": {}})
    assert len(box) == 1 and upstream.counters["lateAnswers"] == 5


def test_upstream_progress_goes_to_the_call_that_asked_for_it_and_must_increase(upstream):
    quiet, asking = call([]), call([])
    asking.token = "host-token"
    upstream.send(quiet)
    upstream.send(asking)
    assert upstream.stream.sent[1]["params"]["_meta"]["progressToken"] == 2
    for token, value in ((2, 1), (2, 1), (1, 5), (2, 3), (2, 2), (77, 1), ("2", 9)):
        upstream.say({"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progressToken": token, "progress": value}})
    assert [event[2]["progress"] for event in asking.host.events] == [1, 3]
    assert not quiet.host.events and upstream.counters["droppedProgress"] == 5


NOISE = [b"banner", b"\x1b[31mred\x1b[0m", b"", b"42", b'"ok"', b'{"a":1}', b"\xff\xfe", b'{"jsonrpc":"2.0"', b"\xef\xbb\xbf",
         b'{"jsonrpc":"2.0","id":1.5,"method":"x"}', b"null", b"[]"]


def test_upstream_noise_is_skipped_and_frames_among_it_arrive(upstream):
    box = []
    upstream.send(call(box))
    upstream.say(*NOISE)
    upstream.say(b'\xef\xbb\xbf{"jsonrpc":"2.0","id":1,"result":{"ok":true}}\r')
    assert box == [{"jsonrpc": "2.0", "id": 1, "result": {"ok": True}}]


def test_upstream_a_frame_that_noise_was_glued_to_is_still_an_answer(upstream):
    box = []
    upstream.send(call(box))
    upstream.say(b'Debug: starting{"jsonrpc":"2.0","id":1,"result":{}}')
    assert box and "result" in box[0]


@pytest.mark.parametrize("line", [b'{"jsonrpc":"2.0","id":1,"result":{"t":"\xff"}}', b'{"result":{"t":"\xff"},"jsonrpc":"2.0","id":1}'])
def test_upstream_an_answer_with_bad_bytes_is_an_error_for_its_caller_alone(upstream, line):
    box, other = [], []
    upstream.send(call(box))
    upstream.send(call(other))
    upstream.say(line)
    assert "cannot be read" in box[0]["error"]["message"] and not other


def test_upstream_a_cancelled_call_stays_until_the_server_is_done_with_it(upstream):
    box = []
    cancelled = call(box)
    upstream.send(cancelled)
    upstream.cancel(cancelled, "why")
    assert upstream.stream.sent[-1]["params"] == {"requestId": 1, "reason": "why"}
    assert upstream.in_flight
    upstream.say({"jsonrpc": "2.0", "id": 1, "result": {}})
    assert not box and not upstream.in_flight


def test_upstream_initialize_is_never_cancelled(upstream):
    first = call([], "initialize")
    upstream.send(first)
    upstream.cancel(first, None)
    assert len(upstream.stream.sent) == 1


def test_upstream_pings_are_answered_here_and_questions_are_passed_on(upstream):
    upstream.say({"jsonrpc": "2.0", "id": "p", "method": "ping"}, {"jsonrpc": "2.0", "id": 1, "method": "roots/list"})
    assert upstream.stream.sent == [{"jsonrpc": "2.0", "id": "p", "result": {}}]
    assert upstream.owner.events == [("on_question", {"jsonrpc": "2.0", "id": 1, "method": "roots/list"})]


@pytest.mark.parametrize("revision, good", [(r, True) for r in mcpx.LEGACY_REVISIONS] + [("2026-07-28", False), (None, False), ("1", False)])
def test_upstream_handshake_takes_any_legacy_revision_and_no_other(upstream, revision, good):
    outcome = []
    upstream.handshake({"roots": {}}, outcome.append)
    assert upstream.stream.sent[0]["params"]["capabilities"] == {"roots": {}}
    upstream.say({"jsonrpc": "2.0", "id": 1, "result": {"protocolVersion": revision, "capabilities": {}, "serverInfo": {}}})
    assert (outcome == [None]) is good
    assert ([m.get("method") for m in upstream.stream.sent[1:]] == ["notifications/initialized"]) is good


# ---------------------------------------------------------------------------
# Children
# ---------------------------------------------------------------------------

def test_children_every_state_and_event_is_in_the_table_or_ignored_on_purpose():
    states = {"running", "closing", "terminating", "killing", "sweeping", "gone"}
    events = {"stop", "kill", "exit", "deadline", "clear"}
    # An exit happens once; a deadline needs a timer; "clear" only follows a sweep.
    impossible = {(s, "exit") for s in ("sweeping", "gone")} | {("running", "deadline")} | {
        (s, "clear") for s in states - {"sweeping"}}
    decided = set(mcpx.CHILD_STEPS) | mcpx.CHILD_IGNORED
    assert decided | impossible == set(itertools.product(states, events))
    assert not decided & impossible
    for next_state, method in mcpx.CHILD_STEPS.values():
        assert next_state in states and hasattr(mcpx.Child, method)


# ---------------------------------------------------------------------------
# Pool
# ---------------------------------------------------------------------------

def test_pool_every_instance_state_can_be_left_by_an_exit_but_down():
    states = {state for state, _ in mcpx.INSTANCE_STEPS} | set(mcpx.INSTANCE_STEPS.values())
    assert {state for state, event in mcpx.INSTANCE_STEPS if event == "exit"} == states - {"down"}


def test_pool_waiting_calls_are_taken_in_turn_by_host():
    queue = mcpx.FairQueue()
    calls = {name: [mcpx.Call("m", {"n": n}, None, name) for n in range(3)] for name in "ab"}
    for made in calls["a"] + calls["b"]:
        queue.push(made)
    order = [queue.pop() for _ in range(6)]
    assert [c.host for c in order] == ["a", "b", "a", "b", "a", "b"]
    assert [c.params["n"] for c in order if c.host == "a"] == [0, 1, 2] and len(queue) == 0


def test_pool_a_call_can_leave_the_queue_and_come_back_first():
    queue = mcpx.FairQueue()
    one, two = mcpx.Call("m", {}, None, "a"), mcpx.Call("m", {}, None, "a")
    queue.push(one)
    queue.push(two)
    assert queue.remove(one) and not queue.remove(one) and len(queue) == 1
    queue.push(one, first=True)
    assert queue.drain() == [one, two] and len(queue) == 0


@pytest.mark.parametrize("argv, key", [
    (["npx", "-y", "pkg@1"], ("npx", "pkg@1")), (["/usr/bin/uvx", "pkg"], ("uvx", "pkg")), (["pipx", "run", "x"], ("pipx", "x")),
    (["node", "x.js"], None), (["npx"], None)])
def test_pool_package_launchers_are_told_by_their_package(argv, key):
    assert mcpx.launcher_key(argv) == key


# ---------------------------------------------------------------------------
# Surface
# ---------------------------------------------------------------------------

def make_schema(tools=(), resources=(), templates=(), capabilities=None, revision="2025-11-25"):
    schema = mcpx.Schema("k", "/nowhere")
    schema.known, schema.revision = True, revision
    schema.capabilities = capabilities if capabilities is not None else {"tools": {}, "resources": {}}
    schema.lists = {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in tools], "prompts": [],
                    "resources": [{"uri": uri, "name": uri} for uri in resources],
                    "resourceTemplates": [{"uriTemplate": text, "name": text} for text in templates]}
    return schema


def test_surface_one_server_keeps_its_names_and_its_order():
    surface = mcpx.Surface(["s"])
    surface.schemas["s"] = make_schema(["z.dotted", "a", "ü", "x" * 100])
    page = json.loads(surface.page("tools", "2025-11-25", None, 1000))
    assert [tool["name"] for tool in page["tools"]] == ["z.dotted", "a", "ü", "x" * 100]
    assert surface.resolve("tools", "z.dotted") == ("s", "z.dotted")


def test_surface_merged_names_are_legal_reversible_and_stable():
    names = ["t", "with.dot", "ünï", "x" * 60, "x" * 61, "a_b"]
    surface = mcpx.Surface(["s", "s_a"])
    surface.schemas = {"s": make_schema(names), "s_a": make_schema(["b", "t"])}
    listed = [tool["name"] for tool in json.loads(surface.page("tools", "2025-11-25", None, 1000))["tools"]]
    assert listed == [tool["name"] for tool in json.loads(surface.page("tools", "2025-11-25", None, 1000))["tools"]]
    assert listed[0] == "s_t"
    for name in listed:
        assert len(name) <= 64 and name.replace("_", "").replace("-", "").isalnum() and name.isascii()
        server, own = surface.resolve("tools", name)
        assert mcpx.merged_name(server, own) == name
    assert len(set(listed)) == len(listed)
    with pytest.raises(mcpx.RpcError):
        surface.resolve("tools", "t")


def test_surface_pages_cover_a_list_once_and_old_cursors_are_refused():
    surface = mcpx.Surface(["s"])
    surface.schemas["s"] = schema = make_schema(["t%d" % n for n in range(25)])
    seen, cursor = [], None
    while True:
        page = json.loads(surface.page("tools", "2025-11-25", cursor, 10))
        seen += [tool["name"] for tool in page["tools"]]
        cursor = page.get("nextCursor")
        if cursor is None:
            break
        last = cursor
    assert seen == ["t%d" % n for n in range(25)]
    assert schema.set_list("tools", []) and not schema.set_list("tools", [])
    for bad in (last, "", "x", 5, "0.-1"):
        with pytest.raises(mcpx.RpcError) as caught:
            surface.page("tools", "2025-11-25", bad, 10)
        assert caught.value.code == -32602


def test_surface_capabilities_shown_are_those_of_the_host_s_revision():
    surface = mcpx.Surface(["s"])
    surface.schemas["s"] = make_schema(capabilities={"tools": {}, "completions": {}, "tasks": {"list": {}}, "logging": {}})
    for revision in mcpx.LEGACY_REVISIONS:
        shown = surface.initialize_result(revision)
        assert shown["protocolVersion"] == revision
        assert ("completions" in shown["capabilities"]) == (revision >= "2025-03-26")
        assert ("tasks" in shown["capabilities"]) == (revision == "2025-11-25")
        assert shown["capabilities"]["tools"] == {"listChanged": True} and "prompts" not in shown["capabilities"]


@pytest.mark.parametrize("template, uri, good", [
    ("demo://note/{name}", "demo://note/1", True), ("demo://note/{name}", "demo://note/a/b", False),
    ("file:///{+path}", "file:///a/b", True), ("a{?q}", "a?q=1", True), ("demo://x", "demo://y", False), (None, "x", False),
    ("a.b{x}", "aXb1", False)])
def test_surface_templates(template, uri, good):
    assert mcpx.template_matches(template, uri) is good


def test_surface_a_uri_goes_to_the_server_that_lists_it_then_by_template_then_as_seen():
    surface = mcpx.Surface(["a", "b", "c"])
    surface.schemas = {"a": make_schema(resources=["x://1"]), "b": make_schema(templates=["y://{n}"]), "c": make_schema()}
    assert surface.servers_for_uri("x://1", {}) == ["a"]
    assert surface.servers_for_uri("y://1", {}) == ["b", "a", "c"]
    assert surface.servers_for_uri("z://1", {"z://1": "c"}) == ["c", "a", "b"]


@pytest.mark.parametrize("damage", [b"", b"{", b"null", b'{"lists":{}}', b"\xff", b'{"revision":"x"}'])
def test_surface_a_damaged_cache_file_is_ignored(tmp_path, loop, damage):
    store = mcpx.SchemaStore(loop, mcpx.Log(), str(tmp_path), b"k" * 32)
    definition = define({"command": "x"})
    schema = store.get(definition, {})
    schema.known, schema.capabilities = True, {"tools": {}}
    schema.lists["tools"] = [{"name": "t"}]
    store.save(schema)
    again = mcpx.SchemaStore(loop, mcpx.Log(), str(tmp_path), b"k" * 32).get(definition, {})
    assert again.known and again.lists["tools"] == [{"name": "t"}] and os.stat(again.path).st_mode & 0o777 == 0o600
    with open(again.path, "wb") as file:
        file.write(damage)
    assert not mcpx.SchemaStore(loop, mcpx.Log(), str(tmp_path), b"k" * 32).get(definition, {}).known
    assert not store.get(definition, {"roots": {}}).known, "other capabilities are another schema"


# ---------------------------------------------------------------------------
# Shim
# ---------------------------------------------------------------------------

def test_shim_json_without_the_json_module_is_json():
    value = {"a": ["x\u00e9\ud800\n\"", 1, 2.5, None, True, {"b": []}], "c": {}, "": "\x00"}
    assert json.loads(mcpx.to_json(value)) == value


@pytest.mark.parametrize("kind", ["pipe", "socket", "file", "null"])
def test_shim_writes_whole_and_in_order_to_any_descriptor_without_changing_its_flags(kind, tmp_path):
    import socket
    import threading
    if kind == "pipe":
        read_fd, write_fd = os.pipe()
    elif kind == "socket":
        ends = [end.detach() for end in socket.socketpair()]
        read_fd, write_fd = ends
    else:
        path = str(tmp_path / "out") if kind == "file" else os.devnull
        write_fd, read_fd = os.open(path, os.O_WRONLY | os.O_CREAT), None
    writer, expected = mcpx.HostWriter(write_fd), b""
    for number in range(300):
        data = (b"%d" % number) * random.choice((1, 100, 20000)) + b"\n"
        writer.put(data)
        expected += data
    received = []

    def read():
        data = os.read(read_fd, 50000)
        while data:
            received.append(data)
            data = os.read(read_fd, 50000)
    reader = threading.Thread(target=read)
    if read_fd is not None:
        if kind != "file":
            assert not writer.flush(), "a full pipe must not block the writer"
        reader.start()
    deadline = time.monotonic() + 20
    while not writer.flush():
        assert time.monotonic() < deadline
    assert os.get_blocking(write_fd) and writer.pending_bytes == 0
    if writer._socket is not None:
        writer._socket.close()
    os.close(write_fd)
    if read_fd is not None:
        reader.join(20)
        os.close(read_fd)
        assert b"".join(received) == expected
    elif kind == "file":
        assert (tmp_path / "out").read_bytes() == expected


def test_shim_loads_next_to_nothing(tmp_path):
    """Sets do not flake, milliseconds do: which modules has a shim loaded when it has served a host?"""
    config = tmp_path / "config.json"
    command = mcpx.own_command("demo-server")
    config.write_text(json.dumps({"mcpServers": {"demo": {"command": command[0], "args": command[1:]}}}))
    (tmp_path / "run").mkdir(mode=0o700)
    env = dict(os.environ, HOME=str(tmp_path), MCPX_CONFIG=str(config), XDG_STATE_HOME=str(tmp_path / "state"),
               XDG_CACHE_HOME=str(tmp_path / "cache"), XDG_RUNTIME_DIR=str(tmp_path / "run"))
    env.pop("MCPX_SESSION_ID", None)
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize",
             "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}}
    request = json.dumps(hello).encode() + b"\n"

    def modules(*arguments, data=b""):
        done = subprocess.run([sys.executable, "-X", "importtime", "-I", "-S", "-c"] + list(arguments), input=data,
                              env=env, capture_output=True, timeout=60)
        names = {line.rpartition("|")[2].strip() for line in done.stderr.decode().splitlines() if line.startswith("import time:")}
        return names, done.stdout
    try:
        shim = mcpx.own_command("serve", "demo")[4:]
        modules(*shim, data=request)     # starts the daemon and compiles
        loaded, answer = modules(*shim, data=request)
        assert json.loads(answer)["result"]["serverInfo"]["name"] == "demo"
        bare, _ = modules("import os, time")
        assert loaded - bare == {"__future__", "select", "_socket", "_json"}
    finally:
        subprocess.run(mcpx.own_command("stop"), env=env, capture_output=True, timeout=60)


def test_shim_the_files_head_is_shell_and_python_and_names_its_licence():
    with open(MCPX, encoding="utf-8") as file:
        head = file.read(8192)
    assert len(head[:4096].split("<boot>")) == 4 and "MIT" in head and os.access(MCPX, os.X_OK)
    boot = head.split("<boot>")[2]
    assert "'" not in boot and "\\" not in boot
    compile(boot, "boot", "exec")
