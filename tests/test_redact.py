"""Redaction: what has to go, what has to stay, and that neither a second pass nor a long text changes that."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from re import _constants, _parser  # type: ignore[attr-defined]  # the stubs leave them out
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import redact as redaction
from redact import redact

ROOT: Final = Path(__file__).resolve().parent.parent
MARK: Final = "«redacted»"
CHEAP: Final = settings(derandomize=True, deadline=None, max_examples=150)


def _words(text: str) -> list[str]:
    return text.split()


def _clear(value: Any) -> Any:
    """Gives a case without the signs that keep secret-shaped text out of the file."""
    if isinstance(value, list):
        return [_clear(item) for item in value]
    return value.replace("‖", "")


CASES: Final[list[dict[str, Any]]] = [
    {key: _clear(value) for key, value in case.items()}
    for case in json.loads((ROOT / "tests" / "redaction-cases.json").read_text(encoding="utf-8"))["cases"]
]
HARD: Final = [case for case in CASES if "(hard" in case["why"]]
FIRM: Final = [case for case in CASES if "(hard" not in case["why"]]


def _holds(case: dict[str, Any]) -> bool:
    text, _ = redact(case["text"])
    return not any(secret in text for secret in case["secrets"]) and all(kept in text for kept in case["keep"])


# --------------------------------------------------------------------------------------------------------------- cases


@pytest.mark.parametrize("case", FIRM, ids=lambda case: case["why"])
def test_a_case_loses_its_secrets_and_nothing_else(case: dict[str, Any]) -> None:
    text, count = redact(case["text"])
    assert [secret for secret in case["secrets"] if secret in text] == []
    assert [kept for kept in case["keep"] if kept not in text] == []
    assert (count > 0) == bool(case["secrets"])
    assert redact(text) == (text, 0)


@pytest.mark.parametrize(("secret", "share"), [(True, 0.6), (False, 0.7)], ids=["secrets", "negatives"])
def test_most_hard_cases_hold(secret: bool, share: float) -> None:
    cases = [case for case in HARD if bool(case["secrets"]) == secret]
    missed = [case["why"] for case in cases if not _holds(case)]
    assert len(missed) <= (1 - share) * len(cases), missed


def test_the_example_of_the_reference_keeps_its_name_and_its_command() -> None:
    secret = "gh_live_" + "8f2a91"
    assert redact(f"GITHUB_CLIENT_SECRET={secret} npm run dev") == (f"GITHUB_CLIENT_SECRET={MARK} npm run dev", 1)


def test_every_value_counts_once() -> None:
    text, count = redact("A_TOKEN=abc12345 B_TOKEN=abc12345 tool --password abc12345 https://u:abc12345@host/")
    assert (text.count(MARK), count) == (4, 4)


def test_a_key_inside_a_quoted_assignment_counts_once() -> None:
    text, count = redact(f'{{"private_key": "{_pem(lines=3)}\\n", "id": 1}}')
    assert (text, count) == (f'{{"private_key": "{MARK}\\n", "id": 1}}', 1)


# ----------------------------------------------------------------------------------------------------- reported leaks


def _pem(*, lines: int, end: bool = True, fold: str = "\\n") -> str:
    hyphens = "-" * 5
    body = ("MII" + "AbCd0123" * 8)[:64]
    block = [f"{hyphens}BEGIN RSA PRIVATE KEY{hyphens}", *[body] * lines]
    return fold.join(block + [f"{hyphens}END RSA PRIVATE KEY{hyphens}"] * end)


def test_both_halves_of_a_cloud_key_go_and_their_names_stay() -> None:
    """Case SR-01: the identifier has a prefix of its own, the secret half only its name."""
    public, secret = "AKIA" + "Z" * 16, "k" * 20 + "/" + "Q" * 19
    text, count = redact(f'AWS_ACCESS_KEY_ID={public} and AWS_SECRET_ACCESS_KEY = "{secret}"')
    assert (text, count) == (f'AWS_ACCESS_KEY_ID={MARK} and AWS_SECRET_ACCESS_KEY = "{MARK}"', 2)


@pytest.mark.parametrize("fold", ["\\n", "\n", '\\n" +\n  "'], ids=["escaped", "plain", "strings"])
@pytest.mark.parametrize("end", [True, False], ids=["whole", "cut"])
def test_a_private_key_goes_with_or_without_its_end(end: bool, fold: str) -> None:
    """Case SR-03: a key without its end marker is still a key, down to a last line that was cut."""
    key = _pem(lines=60, end=end, fold=fold) + ("" if end else fold + "MIIcut")
    assert redact(f"wrote {key}") == (f"wrote {MARK}", 1)


def test_what_follows_a_cut_private_key_stays() -> None:
    assert redact(_pem(lines=3, end=False, fold="\n") + "\nthen chmod 600") == (f"{MARK}\nthen chmod 600", 1)


def test_markers_without_a_key_between_them_stay() -> None:
    begin, end = (f"{'-' * 5}{word} PRIVATE KEY{'-' * 5}" for word in ("BEGIN", "END"))
    for text in (f"grep -c -- '{begin}' a.pem", f"look between {begin} and {end} for it"):
        assert redact(text) == (text, 0)


def test_credentials_go_from_remotes_branches_and_file_names() -> None:
    """Case SR-06: a secret reaches a checkpoint through names that nobody typed as a secret."""
    remote, branch, file = "p" * 20, "ghp_" + "b" * 36, "AKIA" + "Y" * 16
    text, count = redact(f"https://user:{remote}@git.example.invalid/x.git on fix-{branch}, ?? key-{file}.txt")
    assert (text, count) == (f"https://user:{MARK}@git.example.invalid/x.git on fix-{MARK}, ?? key-{MARK}.txt", 3)


def test_secrets_in_prose_go() -> None:
    """Case SR-07: notes carried a bot token and a database URL into the next session."""
    bot, password = "xoxb-" + "3" * 24, "w" * 16
    text, count = redact(f"The bot ({bot}) writes to postgres://u:{password}@db/x, see the runbook.")
    assert (text, count) == (f"The bot ({MARK}) writes to postgres://u:{MARK}@db/x, see the runbook.", 2)


# ---------------------------------------------------------------------------------------------------- names and values

SECRET_NAMES: Final = _words(
    """PASSWORD DB_PASSWORD PGPASSWORD password1 adminPassword MYSQL_PWD SMTP_PASS passphrase API_TOKEN accessToken
    token_v2 authToken APP_SECRET clientSecret SECRET_KEY_BASE API_KEY apiKey APIKey X-Api-Key STRIPE_KEY_LIVE
    AccountKey db.password REDIS_AUTH GCP_CREDENTIALS DEPLOY_CREDS GITHUB_PAT client-key-data"""
)
OTHER_NAMES: Final = _words(
    """monkey turkey keyboard keypoints tokenizer tokens max_tokens token_count TOKEN_TTL TOKEN_LIMIT PASSWORD_FILE
    PASSWORD_MIN_LENGTH TOKEN_TYPE PASSWORD_PATH secretary passport compass bypass author SSH_AUTH_SOCK
    secret_id SharedAccessKeyName password_hash key SECRET_NAME"""
)


@pytest.mark.parametrize(
    "form", ["{}=Abc123Def456 x", '{{"{}": "Abc123Def456"}}', "{}: Abc123Def456", "--{} Abc123Def456"]
)
@pytest.mark.parametrize("name", SECRET_NAMES)
def test_the_name_of_a_secret_announces_one_in_every_form(name: str, form: str) -> None:
    text = form.format(name)
    assert redact(text) == (text.replace("Abc123Def456", MARK), 1)


@pytest.mark.parametrize("form", ["{}=Abc/123 x", '{{"{}": "Abc/123"}}', "{}: Abc/123", "--{} Abc/123"])
@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_key_word_inside_another_name_announces_nothing(name: str, form: str) -> None:
    text = form.format(name)
    assert redact(text) == (text, 0)


REFERENCES: Final = _words(
    """$TOKEN ${TOKEN} ${TOKEN:?unset} $(pass) ${{secrets.TOKEN}} {{token}} <token> {token} %TOKEN% $env:TOKEN %s
    op://vault/item ~/.token ./token.txt /run/secrets/token true null undefined none *** xxxx ... [REDACTED]"""
)


@pytest.mark.parametrize("value", [*REFERENCES, "$(pass show api/token)", "<your token>", "${{ secrets.TOKEN }}"])
def test_a_value_that_only_refers_to_the_secret_stays(value: str) -> None:
    for text in (f"APP_PASSWORD={value} make", f'password: "{value}"', f"Authorization: Bearer {value}"):
        assert redact(text) == (text, 0)


@pytest.mark.parametrize("value", ["pre$TOKEN", "$TOKEN-Abc123", "${A}x1", "{{a}}x1", "$(pass)x1", "pa$$w0rd", "<a>x1"])
def test_a_value_that_only_holds_a_reference_goes(value: str) -> None:
    assert redact(f"APP_PASSWORD={value} make") == (f"APP_PASSWORD={MARK} make", 1)


@pytest.mark.parametrize(
    ("value", "is_secret"),
    [("v1", False), ("id", False), ("user_id", False), ("1234567", False), ("abc123", True), ("12345678", True),
     ("settings", True), ("a/b", True)],
)  # fmt: skip
def test_under_a_name_that_ends_in_key_a_short_plain_word_or_number_stays(value: str, is_secret: bool) -> None:
    for name in ("CACHE_KEY", "primaryKey"):
        assert redact(f"{name}={value}") == (f"{name}={MARK if is_secret else value}", int(is_secret))


def test_a_short_plain_word_is_a_password_all_the_same() -> None:
    assert redact("DB_PASSWORD=id make") == (f"DB_PASSWORD={MARK} make", 1)


@pytest.mark.parametrize(
    "line",
    [
        "Authorization: Bearer «mysecrettoken»",
        "curl -H 'authorization: bearer «hunter»' https://host",
        "STRIPE_SECRET=«482913»",
        "OTP_TOKEN=«482913»",
        "tool --token «482913»",
        "DB_PASSWORD=«hunter2.txt» make",
        "DB_PASSWORD=«/app/hunter2» make",
        "userPassWord=«Hunter2x»",
        "pass_word: «Hunter2x»",
    ],
)
def test_a_value_that_looks_like_a_word_a_number_or_a_path_goes_where_it_is_none(line: str) -> None:
    text = line.replace("«", "").replace("»", "")
    assert redact(text) == (re.sub("«.*»", MARK, line), 1)


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer token is missing",
        "token=42",
        "max_token: 4096",
        "DB_PASSWORD=/app/secrets/db.txt",
        "TLS_SECRET=ca.pem",
    ],
)
def test_such_a_value_stays_where_it_is_one(text: str) -> None:
    assert redact(text) == (text, 0)


@pytest.mark.parametrize("flag", ["--secret {}", "--secret={}", '--secret "{}"'])
def test_docker_names_its_secrets_without_showing_them(flag: str) -> None:
    text = f"docker build {flag.format('id=npmrc,src=$HOME/.npmrc')} ."
    assert redact(text) == (text, 0)


@pytest.mark.parametrize(
    "line",
    [
        "curl -sSu bot:«» https://host",
        "curl -H 'X: y' --user \"bot:«»\" https://host",
        "curl https://host; docker run -u 1000:1000 app",
        "mysql -uroot -p«» -e 'select 1'",
        "mysql -u root -p app; mkdir -p src",
        "docker login -u ci -p «» ghcr.io && cp -p a b",
        "podman login \\\n  -p «»",
        "kubectl create secret generic a --from-literal=user=ci --from-literal=one=«» --from-literal=two=«»",
        "echo «» | docker login --password-stdin",
        "docker login --password-stdin <<< «»",
        "git config --global github.token «»",
        "aws configure set aws_secret_access_key «»",
        "ENV NPM_TOKEN «»",
        "machine host login bot\npassword «»",
        "ALTER USER app WITH PASSWORD '«»';",
        "<password>«»</password>",
        "- name: DB_PASSWORD\n  value: «»",
        "token:\n  secret: |\n    «»\n  name: a",
        "os.environ['API_KEY'] = '«»'",
        'token: str = "«»"',
        "headers.set('X-Auth-Token', '«»')",
        "Set-Cookie: sid=«»; HttpOnly",
        "https://«»«»@host/a.git",
        "API key: «» (rotate it)",
    ],
)
def test_a_line_loses_exactly_its_secrets(line: str) -> None:
    text = line.replace("«»", "Abc123Def456")
    expected = line.replace("«»«»", MARK).replace("«»", MARK)
    assert redact(text) == (expected, expected.count(MARK))


# -------------------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("table", ["_LABELLED", "_COMMANDS", "_TOKENS", "_NAMES", "_SPARES"])
def test_every_row_has_a_name_of_its_own_and_a_reason(table: str) -> None:
    rows = getattr(redaction, table)
    assert len({row.name for row in rows}) == len(rows)
    assert all(row.reason and row.pattern for row in rows)


@pytest.mark.parametrize("row", redaction._TOKENS, ids=lambda row: row.name)
@settings(CHEAP, max_examples=3, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_token_is_found_within_a_sentence(row: Any, data: st.DataObject) -> None:
    # hypothesis knows no possessive repeats, and what stands before a token has to be written out for it
    pattern = re.sub(r"(?<=[*+?}])\+", "", row.pattern)
    before = ""
    if behind := re.match(r"\(\?<=([^)]*)\)", pattern):
        before, pattern = behind[1].replace("\\", ""), pattern[behind.end() :]
    token = data.draw(st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True))
    if token[-1].isalnum():
        assert redact(f"saw {before}{token} fail") == (f"saw {before}{MARK} fail", 1)


def test_importing_compiles_no_pattern() -> None:
    program = "import re; re.compile = None; import redact; assert redact._compiled.cache_info().currsize == 0"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


# ---------------------------------------------------------------------------------------------------------- idempotence

FRAGMENTS: Final = st.one_of(
    st.sampled_from(
        _words(
            f"""password token secret api_key KEY= TOKEN= = : := " ' ` \\" \\ ( ) [ ] {{ }} < > | & ; , . - -- / //
            :// @ $ # ? {MARK} « » ${{ {{{{ $( --password --token -u -p curl mysql docker login echo
            Authorization: Bearer Basic https://u: @host user:pass null x1 Abc123Def456 -----BEGIN -----END
            PRIVATE KEY-----"""
        )
    ),
    st.sampled_from(["\n", " ", "\t", "\\n", "  ", "\n\n", " = ", ": ", "=", "ghp_" + "b" * 36, "AKIA" + "Y" * 16]),
    st.builds(_pem, lines=st.integers(0, 2), end=st.booleans(), fold=st.sampled_from(["\n", "\\n"])),
    st.sampled_from([case["text"] for case in CASES]),
    st.text(max_size=4),
)


@settings(CHEAP, max_examples=600)
@given(st.lists(FRAGMENTS, max_size=14).map("".join))
@example("token=conf." + "AKIA" + "Y" * 16)
@example("sk-key: " * 30)
@example("echo Abc123 | docker login --password-stdin | " * 30)
@example("\ud800token=\udfff")
def test_a_redacted_text_comes_back_unchanged(text: str) -> None:
    once, count = redact(text)
    assert count or once == text
    assert redact(once) == (once, 0)


# ----------------------------------------------------------------------------------------------------- what has to stay

WORDS: Final = _words(
    """the a token password secret key keys API Bearer Basic auth login flag refresh expires is was stale not
    rotate field reset test session cookie header user admin monkey tokenizer hash after before and fix docs v2
    OAuth2 base64 sha256 404 two"""
)
PATHS: Final = _words(
    "src auth token password_reset secrets keys api-key session.ts token.test.ts .env README.md v1.2 a b-c"
)
NAMES: Final = _words("token password secret api_key accessToken user_id session apiKey max_tokens key")
CALLS: Final = _words("get_token() os.environ['X'] req.body.token process.env.API_KEY next() None")
HASHES: Final = st.sampled_from([7, 12, 32, 40, 64]).flatmap(
    lambda n: st.text("0123456789abcdef", min_size=n, max_size=n)
)
HASH_FORMS: Final = (
    "{}",
    "git show {}:src/a.ts",
    "BASE={} && git diff",
    "reverted {} because the token looped",
    "app@sha256:{}",
    "commit {}\n",
    "a-{}.tgz",
    "/objects/{}/x",
    "index {}..{}",
    '"hash": "{}"',
)
CODE_FORMS: Final = (
    "if ({0} !== {1}) return;",
    "{0} = {2}",
    "const {0} = await fetch({1});",
    "def f({0}: str, {1}=None): ...",
    "f({0}={2}, {1}={0})",
    "self.{0} = {1}",
    "interface A {{ {0}: string; {1}?: number }}",
    "{0}.{1}({2})",
    "return {{ {0}, {1} }}",
    "{0}: {2},",
    "for {0} in {1}s:",
    "x[{0}:{1}]",
    "url = '?{0}=' + {1} + '&x=1'",
    'f"{0}={{{1}}}"',
    "`${{{0}}} ${{{1}}}`",
    "{0}::{1}",
    "let {0}: Option<{1}>;",
    "grep -rn {0} src | sort -k {1}",
)


@CHEAP
@given(
    st.lists(
        st.tuples(st.sampled_from(WORDS), st.sampled_from([" ", ", ", "; ", ". ", " (", ") ", "? ", " - "])),
        max_size=30,
    )
)
def test_prose_about_secrets_stays(words: list[tuple[str, str]]) -> None:
    text = "".join(word + mark for word, mark in words)
    assert redact(text) == (text, 0)


@CHEAP
@given(HASHES | st.uuids().map(str), st.sampled_from(HASH_FORMS))
def test_hashes_and_identifiers_stay(value: str, form: str) -> None:
    text = form.replace("{}", value)
    assert redact(text) == (text, 0)


@CHEAP
@given(
    st.lists(st.sampled_from(PATHS), min_size=1, max_size=8),
    st.sampled_from(["{}", "/{}", "./{}:42:7", "cat ~/{} | wc", "git add {}"]),
)
def test_paths_stay(segments: list[str], form: str) -> None:
    text = form.format("/".join(segments))
    assert redact(text) == (text, 0)


@CHEAP
@given(st.sampled_from(NAMES), st.sampled_from(NAMES), st.sampled_from(CALLS), st.sampled_from(CODE_FORMS))
def test_code_that_handles_secrets_stays(one: str, two: str, call: str, form: str) -> None:
    text = form.format(one, two, call)
    assert redact(text) == (text, 0)


# --------------------------------------------------------------------------------------------------------------- linear


_GREEDY_OR_LAZY: Final = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)


def _longest_repeats(pattern: Any) -> list[int]:
    """Gives how often each repeat in a parsed pattern may repeat and still give back what it took."""
    found = []
    for part in pattern:
        if isinstance(part, tuple) and part and any(part[0] is kind for kind in _GREEDY_OR_LAZY):
            found.append(int(part[1][1]))
        if isinstance(part, tuple | list | _parser.SubPattern):
            found += _longest_repeats(part)
    return found


def test_no_pattern_can_give_back_a_long_run() -> None:
    compiled = redaction._compiled()
    patterns = (*compiled.rules, compiled.names, *compiled.plain, *compiled.values.values(), compiled.spares)
    for pattern in patterns:
        assert max(_longest_repeats(_parser.parse(pattern.pattern)), default=0) <= 200


# What is repeated: each begins something whose end a search could look for again and again.
UNITS: Final = (
    *_words(
        """A_ a. a= a=a= key= token= token=" token='" token="\\" token=< token=$( token=${ token={{ token=~/
        token=file: {"token":" password1 :// ://a: ://a:b@ eyJ- eyJaaaaaaaaaa. sk- _live_ name= <password> $((
        \\"""
    ),
    "-----BEGIN PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----\nMIIEAbCdEfGhIjKl\n",
    "token: |\n ",
    "token: token:",
    "sk-key: ",
    "-live_x.",
    "A3-AAAAAA-",
    "Bearer ",
    "Authorization: ",
    "login a ",
    "--token ",
    "curl ",
    "curl -u ",
    'curl "',
    "mysql -",
    "docker login ",
    "echo a | ",
    "user ",
    "cookie: a=",
    "config set ",
    "api key ",
    " ",
    "\n",
    MARK,
)


def _cpu_s(text: str) -> float:
    begin = time.process_time()
    redact(text)
    return time.process_time() - begin


@pytest.mark.parametrize("unit", UNITS)
def test_eight_times_the_text_is_about_eight_times_the_work(unit: str) -> None:
    """Cases SR-03 and SR-04: masking took minutes, and quadratic time, on runs like these. Quadratic would be 64."""
    short, long = ((unit * size)[:size] for size in (1_000, 8_000))
    redact(short)
    assert min(_cpu_s(long) for _ in range(2)) < 30 * min(_cpu_s(short) for _ in range(5))
