"""Text without its secrets: `redact` puts `«redacted»` in the place of each. Knows no file, clock or network.

The tables decide: a rule finds where a secret stands, a name says which labels announce one, a spare says which values
are none. To teach it a vendor or a command, add a row. It is a net below an agent that writes down what it did, not a
proof: a secret that neither looks like one nor is called one passes.

Three properties hold for any text:
- The work grows in step with the text. A pattern takes a run of characters whole or not at all (possessive repeats),
  begins once per run and looks ahead a bounded way; a value is read only after its name announced a secret, and one
  that is spared afterwards is short or announces nothing inside. Rows that are added have to keep to that.
- A redacted text comes back unchanged, with a count of 0. What a row looks at behind a value must not mind the mark.
- All that is no secret stays, character by character.
"""

import re
from functools import cache
from typing import Final, NamedTuple

_MARK: Final = "«redacted»"

# A secret that is gone can uncover another, so a text is read until nothing is found: mostly twice. The limit keeps the
# work in step with the text even where somebody stacks them up.
_PASSES: Final = 10


class _Rule(NamedTuple):
    """Where a secret stands.

    A group `secret` in the pattern is the secret itself. A pattern without one ends where the value begins, and a group
    `quote` tells how far the value goes. A group `name` has to be the name of a secret for the rule to hold.
    """

    name: str
    reason: str
    pattern: str


class _Name(NamedTuple):
    """How the names of secrets end, as lower-case words joined by `_`, and which values are plain under such a name.

    `odd` ones are secret though a spare would let them go.
    """

    name: str
    reason: str
    pattern: str
    plain: str
    odd: str = r"(?!)"


class _Spare(NamedTuple):
    """A value that is no secret under any name: the pattern has to match the whole of it."""

    name: str
    reason: str
    pattern: str


# --------------------------------------------------------------------------------------------------------------- names

# `DB_PASSWORD_PROD`, `SECRET_KEY_BASE` and `token2` are as secret as without the last word; `TOKEN_TTL` is not.
_QUALIFIER: Final = (
    r"(?:_?\d++|_(?:v\d++|base|base64|b64|confirm|confirmation|current|data|dev|development|hex|live|new|old|pem|previous"
    r"|primary|prod|production|secondary|staging|string|test|value))?+"
)

_FILE_ENDS: Final = "json|key|p12|pem|pfx|toml|txt|ya?ml"

_NAMES: Final = (
    _Name(
        "password",
        "people choose words and numbers, so no value is plain",
        r"pass_?word|passwd|passphrase|passcode|_pwd|mnemonic|seed_phrase"
        r"|contraseña|contrasena|kennwort|mot_de_passe|passwort|senha|пароль|パスワード|密码",
        r"(?!)",
        rf"[\w-]++\.(?:{_FILE_ENDS})|/(?:app|code|dev|srv|usr|workspace)/[^\s/]++",  # no place to keep a secret in
    ),
    _Name(
        "token or secret",
        "issued by a machine, so a short number is a count or a position; a code to be used once has six digits",
        r"token|secret|_pass|(?:db|ftp|key|smtp|ssh|store|user)pass",
        r"-?\d{1,5}",
    ),
    _Name(
        "key",
        "the word also names columns, caches and sort orders, whose values are short and plain",
        r"_key|(?:access|account|admin|api|app|auth|encryption|license|master|private|secret|service|shared|signing|ssh)key",
        r"(?=.{1,7}\Z)(?:[A-Za-z_-]*+\d{0,2}|\d++)",
    ),
    _Name(
        "loose word",
        "as often the name of a method, a state or a choice, whose values are words",
        r"\A(?:pass|pwd)|(?:\A|_)(?:auth|basicauth|bearer|creds?|credentials?|hmac|jwt|pw|salt)"
        r"|(?:\A|_)(?:ado|azure|devops_ext|gh|git|github|gitlab)_pat",
        r"[A-Za-z]++(?:[ _-][A-Za-z]++)*+|[a-z]{1,10}\d{1,3}|\d{1,7}",
    ),
)

# -------------------------------------------------------------------------------------------------------------- spares

# {{x}} ${{x}} ${x} #{x} $(x): each stops at the next opening bracket of its kind, so that a row of them is read once.
_REFERENCE: Final = r"\$?\{\{[^{}\n]*+\}\}|[$#]\{[^{}\n]*+\}|\$\((?:[^()\n]|\([^()\n]*+\))*+\)"

_SPARES: Final = (
    _Spare("mark", "it is redacted already", rf"(?:{_MARK}|\\[nrt]|\s)++"),
    _Spare(
        "reference",
        "the value is filled in elsewhere; where the reference is only a part, the rest is the secret",
        rf"{_REFERENCE}|\$(?:env:)?+\w++|<[^<>]*+>|\{{[\w.]*+\}}|%\w++%|%\(?+\w{{0,40}}\)?+[drs]|\?|:\w++"
        r"|(?:env:|file:|op://|vault:)[^\s=:]++|arn:aws[\w:/.-]{0,200}"
        r"|!(?:GetAtt|ImportValue|Ref|Sub|env_var|reference|secret|vault)",
    ),
    _Spare(
        "selection", "docker's --secret id=…,src=… names one", r"(?:(?:env|id|source|src|target|type)=[^\s=,]*+,?)++"
    ),
    _Spare(
        "path",
        "it says where the secret is",
        rf"(?:~|\.{{1,2}}|https?:/)/[^\s=:?@]*+|[A-Za-z]:\\[^\s=:]*+|@?[\w./-]{{1,200}}\.(?:{_FILE_ENDS})"
        r"|/(?:app|code|dev|etc|home|mnt|opt|private|root|run|secrets|srv|tmp|usr|Users|var|workspace)/[^\s=:]*+",
    ),
    _Spare("mask", "somebody hid it before", r"[*•]++|\.{4,9}|[xX]{3,99}|[\[(]?(?i:redacted|masked|hidden)[\])]?"),
    _Spare("sign", "the begin of a comment, a separator, an ellipsis", r"[^\w\s]{1,3}"),
    _Spare("constant", "a switch or an absence", r"(?i:true|false|yes|no|on|off|null|none|nil|undefined)"),
    _Spare("colour", "themes have tokens and keys too", r"#[0-9A-Fa-f]{3,8}"),
    _Spare(
        "state",
        "it tells what is the matter with the secret",
        r"(?i:absent|changed|default|empty|expired|invalid|missing|optional|present|required|revoked|rotated|set|stale"
        r"|tbd|todo|unknown|unset|valid)",
    ),
)

# -------------------------------------------------------------------------------------------------------------- values

_END: Final = r"""(?=[\s"'`;,&|<>()\[\]{}]|\Z)"""

# Without quotes a value ends where a shell, a URL or a list would end it; closing brackets belong to it inside only.
_BARE: Final = (
    rf"(?:<[^<>\n]*+>|{_REFERENCE}|\\(?![\snrt\"'])|[^\s\"'`;&|<>,()\[\]{{}}\\])"
    rf"(?:{_REFERENCE}|\\(?![\snrt\"'])|[^\s\"'`;&|<>,)\]}}\\]|[)\]}}](?=\w))*+"
)


def _quoted(quote: str) -> str:
    """Gives the pattern of a value in these quotes: over lines but not over a blank one; where it was cut, the line."""
    return rf"(?P<secret>(?:[^{quote}\\\n]|\\[\s\S]|\n(?![ \t]*+\n))++(?={quote})|[^\s{quote}][^\n{quote}]*+)"


def _escaped(quote: str) -> str:
    """Gives the pattern of a value in these quotes behind backslashes, as in JSON within JSON."""
    return rf"(?P<secret>(?:[^{quote}\\]|\\(?!{quote}))++(?=\\{quote})|[^\s{quote}\\][^\n{quote}\\]*+)"


# The lines of a YAML block: those that are indented at least as far as the first.
_BLOCK: Final = r"[-+\d]{0,2}[ \t\r]*+\n(?P<indent>[ \t]++)(?P<secret>[^\n]++(?:\n(?P=indent)[^\n]*+)*+)"

_VALUES: Final[dict[str | None, str]] = {
    None: rf"(?P<secret>{_BARE})",
    **{quote: _quoted(quote) for quote in "\"'`"},
    **{"\\" + quote: _escaped(quote) for quote in "\"'`"},
    "|": _BLOCK,
    ">": _BLOCK,
}

# --------------------------------------------------------------------------------------------------------------- rules

# A quote opens a value unless a string ends here, as in `"?token=" + token`; the letters before it are those of Python
# and C#. A bar opens a YAML block.
_QUOTE: Final = (
    r"""(?:(?:[A-Za-z$@]{1,2}(?=["'`]))?+"""
    r"""(?P<quote>\\?["'`](?![ \t]*+(?:\+[ \t]|\.\w{1,40}\(|[,;)\]}]++(?=\s|\Z)|\n|\Z))"""
    r"""|[|>](?=[-+\d]{0,2}[ \t\r]*+\n[ \t])))?+"""
)
_CLOSE: Final = r"""(?:\\?["'`]|\*\*)?+\]?+"""
# A name is one word, but for "API key" and its like.
_NAMED: Final = (
    r"(?<![\w.-])(?P<name>(?i:(?:access|account|api|auth|license|master|private|secret|signing) (?=key\b))?+[\w.-]++)"
)

# Code names a value instead of holding it: a call, a subscript, an attribute, a variable that is named like a secret.
_CODE: Final = (
    r"(?:(?:async|await|fn|func|function|if|lambda|match|new|not|switch|typeof|yield)\b[ \t]"
    r"|(?:break|continue|raise|return|throw)\b"
    r"|[!&*]{0,2}+[A-Za-z_$][\w$]{0,39}+(?:(?:\??\.|->|::)[A-Za-z_$][\w$]{0,39}+)*+(?:[(\[]|->)"
    rf"|[!&*]{{0,2}}+[A-Za-z_$]{{1,40}}+(?:(?:\??\.|->)[A-Za-z_$][\w$]{{0,39}}+)++{_END}"
    rf"|(?:[A-Za-z]{{1,20}}+_){{0,4}}+(?i:credentials?|key|passwd|password|secret|token){_END}"
    rf"|[a-z]{{1,20}}(?:[A-Z][a-z]{{1,20}}){{0,4}}(?:Credentials?|Key|Password|Secret|Token){_END})"
)
_TYPE: Final = (
    r"(?:[&*]?(?:any|bool|boolean|bytes|char|int|integer|number|object|str|Str|string|String|unknown"
    rf"|SecretStr|SecretString){_END}|[A-Z]\w{{0,40}}+[<\[]"
    rf"|_?[A-Z]\w{{0,40}}(?:Credential|Key|Password|Secret|Token|Type)s?(?:Types)?{_END})"
)
# A colon in a sentence, `token: refresh it first`, in the name of a script, `token:refresh`, or before a line number.
_PROSE: Final = (
    rf"(?:[A-Za-z][a-z]{{0,30}}+(?:-[a-z]{{1,30}}+){{0,4}}+[.,:!?]?[ \t]++(?:[A-Za-z(]|{_MARK})"
    rf"|(?<=\w:)(?:[A-Za-z]{{1,30}}+(?:[:-][A-Za-z]{{1,30}}+){{0,4}}+|\d{{1,7}}(?::\d{{1,7}})?){_END})"
)
# Words that follow the name of a flag where somebody writes about it.
_SENTENCE: Final = (
    r"a|an|and|are|argument|as|at|but|by|can|does|flag|for|from|has|if|in|instead|is|it|must|not|on|option|or|parameter"
    r"|should|so|that|the|then|to|value|was|when|which|will|with|works"
)

# Where this stands in a command, it reads a password.
_READS: Final = r"(?:-stdin|--with-token|sudo -S|chpasswd)"


def _option(command: str, option: str, *, within: str = r"[^\n;|&]") -> str:
    """Gives the pattern from a command to its option. It ends where the command stands again, to be read once."""
    begin = rf"(?<![\w-])(?:{command})(?=\s)"
    return rf"{begin}(?:(?!\s(?:{option})|{begin})(?:\\\n|{within}))*+\s(?:{option})"


# A private key ends at its end marker or, where it was cut, with the last line that can belong to it. Markers without
# any base64 between them are somebody writing about keys.
_BASE64: Final = r"[A-Za-z0-9+/=]"
_INSIDE: Final = r"(?:[^-]|-(?!----))"
_FOLD: Final = r"(?:[\s\"'+,>|]|\\[nrt])*+"  # between two lines, also where they are strings of code
_PRIVATE_KEY: Final = (
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:"
    rf"(?:(?!{_BASE64}{{16}}){_INSIDE})*+{_BASE64}{_INSIDE}*+-----END [A-Z0-9 ]{{0,40}}PRIVATE KEY(?: BLOCK)?-----"
    rf"|(?:{_FOLD}(?:{_BASE64}{{16,}}+|(?:Proc-Type|DEK-Info|Version|Comment): [^\n\\]*+))++"
    rf"(?:{_FOLD}{_BASE64}{{1,15}}+(?=[\s\"'\\]*+\Z))?+)"
)

# What the text around it gives away. Order matters: secrets over several lines go before the rules that read lines, and
# those in a URL before the names that could take the host along.
_LABELLED: Final = (
    _Rule("private key", "PEM, OpenSSH and PGP, also with \\n for line ends", rf"(?P<secret>{_PRIVATE_KEY})"),
    _Rule(
        "PuTTY key",
        "its private lines; the public ones stay",
        r"Private-Lines: \d{1,3}\s++(?P<secret>[A-Za-z0-9+/=]{16,}+(?:\s++[A-Za-z0-9+/=]{16,}+)*+)",
    ),
    _Rule(
        "URL password",
        "scheme://user:password@host; the last @ before the path ends it",
        r"://[^\s/:@?#\"'`<>]*+:(?P<secret>[^\s/?#\"'`@]++(?:@[^\s/?#\"'`@]*+(?=@[\w\[]))*+)(?=@[\w\[])",
    ),
    _Rule(
        "URL token",
        "scheme://token@host; user names are shorter",
        r"://(?P<secret>(?=[\w-]{0,60}\d)[\w-]{20,}+)(?=(?::[^\s/@]*+)?@)",
    ),
    _Rule(
        "URL parameter",
        "signed links and API keys; the words are too common to be secret elsewhere",
        r"(?:[?&](?:[\w-]{0,40}[_-])?(?i:auth|key|sig|signature)|, ?Signature)=(?P<secret>[^\s&#,\"'`<>]{16,}+)",
    ),
    _Rule(
        "Authorization",
        "the header with any scheme or none",
        rf"(?i:(?<![a-z0-9])authorization){_CLOSE}[ \t]*+(?:[:=]|,(?=[ \t]*+[\"'`]\w{{1,20}} \S))(?:\\?[ \t])*+{_QUOTE}"
        rf"(?:[A-Za-z][\w-]*+(?:\\?[ \t])++(?=[^\s\"'`]))?+"
        rf"(?:(?<=[Bb]earer )(?!(?:{_SENTENCE}|auth\w{{0,9}}|header|jwt|realm|scheme|tokens?){_END})"
        rf"|(?<![Bb]earer )(?![A-Za-z]?[a-z]{{1,20}}+[ \t]*+{_END}))(?!\w{{1,20}}=[^\s=]|{_CODE})",
    ),
    _Rule("Bearer", "a scheme without its header", r"(?i:\bbearer) ++(?P<secret>(?=\S{0,60}\d)[\w.~+/-]{16,}+=*+)"),
    _Rule("Basic", "user:password", r"\b[Bb]asic ++(?P<secret>(?=\S{0,60}[A-Z0-9=])[A-Za-z0-9+/]{16,}+=*+)"),
    _Rule(
        "cookie",
        "the value of the first cookie; attributes stay",
        r"(?i:(?<![a-z0-9])(?:set-)?cookie)[\"']?:[ \t]*+[\"']?[\w.-]++=(?P<secret>[^\s;,\"'`<>]{8,}+)",
    ),
    _Rule(
        "flag",
        "--name value; where somebody explains the flag, it goes on with a sentence or a VALUE",
        r"(?<![\w.-])--?(?P<name>[A-Za-z][\w.-]*+)(?:[ \t]*+\\\n[ \t]*+|[ \t]++)"
        rf"(?!-|(?:{_SENTENCE}|(?:[A-Z]{{1,20}}_){{0,4}}(?:KEY|PASSWORD|SECRET|STRING|TOKEN|VALUE)){_END}){_QUOTE}",
    ),
    _Rule(
        "assignment",
        "NAME=value of shells, .env files, URLs and connection strings; `NAME= command` sets nothing",
        rf"{_NAMED}{_CLOSE}:?=(?![=~>]|`[^`\n]{{0,99}}[ \t])(?!(?<=[a-z]=)(?:{_CODE}|[a-z_]{{1,40}}+\))){_QUOTE}",
    ),
    _Rule(
        "spaced assignment",
        "name = value of code and INI files",
        rf"{_NAMED}{_CLOSE}(?:[?!]?+[ \t]*+:[ \t]*+[A-Za-z_][\w.]{{0,40}}+(?:\[[^\[\]\n]{{0,40}}\])?)?+"
        rf"[ \t]++(?::?=(?![=~>])|=>(?=[ \t]*+[\"']))[ \t]*+(?!{_CODE}|[A-Za-z_]{{1,40}}+[;)]){_QUOTE}",
    ),
    _Rule(
        "member",
        "name: value of headers, YAML and JSON",
        rf"(?<!//)(?<!\$\{{){_NAMED}{_CLOSE}[?!]?+[ \t]*+:(?![:=/])(?:\*\*)?+[ \t]*+"
        rf"(?!{_TYPE}|{_CODE}|{_PROSE}){_QUOTE}",
    ),
    _Rule("argument", "set('NAME', 'value')", rf"(?<=\()[\"']{_NAMED}[\"'][ \t]*+,[ \t]*+(?=[\"']){_QUOTE}"),
    _Rule(
        "named value",
        "name: NAME, value: value of container and .NET settings",
        rf"(?<!\w)(?:name|key)[\"']?[ \t]*+[:=][ \t]*+[\"']?{_NAMED}[\"']?,?\s*+"
        rf"[\"']?value[\"']?[ \t]*+[:=][ \t]*+{_QUOTE}",
    ),
    _Rule("element", "<name>value</name>", r"<(?P<name>[\w.:-]++)(?:[ \t][^<>\n]*+)?>(?P<secret>[^<>\s][^<>]*+)(?=</)"),
    _Rule(
        "setting",
        "commands and Dockerfiles that set a name to the next word",
        r"(?<![\w-])(?:set[ \t]++-[A-Za-z]{0,5}x[A-Za-z]{0,5}|setx|setenv|ENV|config(?:ure)?[ \t]++set"
        rf"|git[ \t]++config(?:[ \t]++--\w++)?+)[ \t]++[^\s=]{{0,80}}?{_NAMED}[ \t]++(?!{_PROSE}){_QUOTE}",
    ),
    _Rule(
        "netrc",
        "machine host login user password value",
        rf"\b(?:machine\s++\S++|default)\s++login\s++\S++\s++password\s++{_QUOTE}",
    ),
    _Rule(
        "literal",
        "kubectl's literals are secrets under any name, but words and short numbers are settings",
        rf"--from-literal[ \t=]++[\"']?[\w.-]++=(?![A-Za-z]++(?:[_-][A-Za-z]++)*+{_END}|\d{{1,7}}{_END}){_QUOTE}",
    ),
    _Rule("Wi-Fi", "wifi connect network password value", rf"\bwifi connect \S++ password {_QUOTE}"),
    _Rule(
        "SQL",
        "a role's password is a string after a word",
        rf"\b(?:IDENTIFIED (?:WITH \S++ )?BY|(?i:(?:user|role)\b[^;\n]{{1,80}}?\b(?:identified by|password)))[ \t]++"
        rf"(?=['\"]){_QUOTE}",
    ),
    _Rule(
        "call",
        "setPassword('value')",
        rf"(?<![A-Za-z])(?i:(?:set|with)?_?(?:access_?token|api_?key|client_?secret|passw(?:or)?d|secret_?key))"
        rf"\((?=[\"']){_QUOTE}",
    ),
    _Rule(
        "told",
        "the password is 'value1', the token Value23value23value23; most that follows these words describes",
        r"(?i:\b(?:api key|pass(?:word|phrase|code)|secret|token) (?:is |was |to )?)(?:"
        r"(?=[\"'`][^\s\"'`]{0,60}\d[^\s\"'`]{0,60}[\"'`])|(?=\w{20})(?=\w{0,60}[A-Z])(?=\w{0,60}\d[A-Za-z_]{0,60}\d))"
        rf"{_QUOTE}",
    ),
    _Rule(
        "piped password",
        "echo value | command that reads a password",
        r"\b(?:echo|printf)[ \t]++(?:-n[ \t]++|[\"']?%s(?:\\n)?[\"']?[ \t]++)?"
        rf"(?=(?:(?!\becho|\bprintf)[^\n|])*+\|(?:(?!{_READS})[^\n|])*+{_READS}){_QUOTE}",
    ),
    _Rule(
        "here string",
        "command that reads a password <<< value",
        rf"{_READS}(?:(?!{_READS})[^\n<])*+<<<[ \t]*+{_QUOTE}",
    ),
    _Rule("SecureString", "PowerShell's", rf"ConvertTo-SecureString(?: -String)?[ \t]++(?=[\"']){_QUOTE}"),
    _Rule(
        "login",
        "commands that take a token as the next word",
        rf"\b(?:ngrok (?:config add-)?authtoken|snyk auth|vault login)[ \t]++(?!-)(?=\S{{0,60}}\d){_QUOTE}",
    ),
    _Rule("Oracle", "user/password@host", r"\b(?:thin:|sqlplus[ \t]++)[\w.$-]++/(?P<secret>[^\s/@\"'`]++)(?=@)"),
    _Rule(
        "curl user",
        "-u user:password; two numbers are a container's user and group",
        _option(
            r"curl|https?|xh", r"(?:-[a-zA-Z]{0,5}[uUa][ \t=]*+|--(?:user|proxy-user|auth)[ \t=]++)", within=r"[^\n]"
        )
        + rf"(?!\d{{1,9}}:\d{{1,9}}\b){_QUOTE}[^\s:\"'`]++:(?!//)",
    ),
    _Rule(
        "curl key",
        "-u key: with nothing for a password",
        _option(r"curl", r"(?:-[a-zA-Z]{0,5}u[ \t]*+|--user[ \t=]++)", within=r"[^\n]")
        + r"[\"']?(?P<secret>[^\s:\"'`]{8,}+)(?=:[\s\"'])",
    ),
)

# Options whose letter means something else with other commands. Each pattern ends where the value begins.
_COMMANDS: Final = (
    _Rule("curl", "-b and --cookie", _option(r"curl", r"(?:-b|--cookie)[ \t=]++[\"']?[\w.-]++=")),
    _Rule("GitHub CLI", "the value of a secret", _option(r"gh secret set", r"(?:-b|--body)[ \t=]*+")),
    _Rule(
        "htpasswd",
        "file, user, password",
        _option(r"htpasswd", r"-[a-zA-Z]{0,5}b[a-zA-Z]{0,5}(?:[ \t]++\S++){2}[ \t]++"),
    ),
    _Rule("LDAP", "-w", _option(r"ldap(?:add|delete|modify|passwd|search|whoami)", r"-w[ \t]*+")),
    _Rule("lftp", "-u user,password", _option(r"lftp", r"-u[ \t]*+[^\s,]++,")),
    _Rule("MongoDB", "-p", _option(r"mongo(?:sh|dump|restore|export|import)?", r"-p[ \t=]*+")),
    _Rule(
        "MySQL, 7-Zip", "-p without a space; with one it asks", _option(r"mysql\w*+|mariadb[\w-]*+|7za?", r"-p(?=\S)")
    ),
    _Rule("OpenSSL", "pass:", _option(r"openssl", r"-pass(?:in|out)?[ \t]++pass:")),
    _Rule("OpenSSL enc", "-k", _option(r"openssl enc", r"-k[ \t]++")),
    _Rule("Redis", "-a", _option(r"redis-cli", r"-a[ \t]++")),
    _Rule(
        "registries",
        "-p",
        _option(r"(?:az|buildah|cf|docker|helm registry|nerdctl|oc|podman|skopeo) login", r"-p[ \t=]*+"),
    ),
    _Rule("Samba", "-U user%password", _option(r"smbclient|rpcclient", r"-U[ \t]*+[^\s%]++%")),
    _Rule("sshpass", "-p", _option(r"sshpass", r"-p[ \t]*+")),
    _Rule("SQL Server, zip", "-P", _option(r"bcp|sqlcmd|unzip|zip", r"-P[ \t]*+")),
)

# What the secret itself looks like: the prefix of its issuer, then at least so many characters, a little fewer than the
# real ones have, since a token may have been cut. `\w` is ASCII here. A token touches no letter or digit on either
# side: `task-…` holds no `sk-…`, and what stands beside a token is none once that is gone.
_TOKENS: Final = (
    _Rule("1Password", "account key, service account", r"A3-[A-Z0-9]{6}(?:-[A-Z0-9]{5,11}){4,5}|ops_eyJ[\w+/=-]{50,}+"),
    _Rule("Adobe", "client secret", r"p8e-[A-Za-z0-9]{30,}+"),
    _Rule("age", "secret key", r"AGE-SECRET-KEY-1[A-Z0-9]{50,}+"),
    _Rule("OpenAI, Anthropic and others", "a digit tells a key from a CSS class", r"sk-(?=[\w-]{0,60}\d)[\w-]{20,}+"),
    _Rule("Airtable", "personal token", r"pat[A-Za-z0-9]{14}\.[a-f0-9]{60,}+"),
    _Rule("Alibaba", "access key", r"LTAI[A-Za-z0-9]{16,}+"),
    _Rule("Artifactory", "API key, reference token", r"AKCp[A-Za-z0-9]{60,}+|cmVmd[A-Za-z0-9]{55,}+"),
    _Rule("Asana", "personal token", r"[012]/\d{16}[:/][A-Za-z0-9:/]{32,}+"),
    _Rule("Atlassian", "API, app and Bitbucket tokens", r"AT(?:ATT|CTT|BB)[\w=-]{24,}+"),
    _Rule("Authress", "service key", r"(?:sc|ext|scauth|authress)_\w{5,30}\.\w{4,6}\.acc[_-][\w.+/=-]{40,}+"),
    _Rule("AWS", "access key id, long-lived and temporary", r"(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}"),
    _Rule("AWS Bedrock", "API key", r"ABSK[\w+/=-]{60,}+"),
    _Rule("Azure", "application secret", r"[\w~.]{3}\dQ~[\w~.-]{28,}+"),
    _Rule("Buildkite", "user and agent tokens", r"bk(?:ua|at|aj)_[A-Za-z0-9]{32,}+"),
    _Rule("CircleCI", "personal and project tokens", r"CCI(?:PAT|PRJ)_[\w-]{30,}+"),
    _Rule("ClickHouse", "cloud key", r"4b1d[A-Za-z0-9]{38}"),
    _Rule("Clojars", "deploy token", r"CLOJARS_[A-Za-z0-9]{50,}+"),
    _Rule("Cloudflare", "origin key", r"v1\.0-[a-f0-9]{24}-[a-f0-9]{100,}+"),
    _Rule("Contentful", "personal token", r"CFPAT-[\w-]{40,}+"),
    _Rule("Databricks", "workspace token", r"dapi[a-f0-9]{32}(?:-\d)?"),
    _Rule("Defined Networking", "API token", r"dnkey-[\w=-]{26}-[\w=-]{50,}+"),
    _Rule("DigitalOcean", "personal, OAuth and refresh tokens", r"do[opr]_v1_[a-f0-9]{60,}+"),
    _Rule("Discord", "bot token", r"[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,}+"),
    _Rule("Discord webhook", "whoever has it can post", r"(?<=/api/webhooks/)\d{15,20}/[\w-]{30,}+"),
    _Rule("Docker", "personal and organisation tokens", r"dckr_[po]at_[\w-]{20,}+"),
    _Rule("Doppler", "tokens of every kind", r"dp\.(?:pt|st|ct|sa|scim|audit)\.[\w.-]{38,}+"),
    _Rule("Dropbox", "short-lived token", r"sl\.[\w-]{100,}+"),
    _Rule("Duffel", "API token", r"duffel_(?:test|live)_[\w=-]{40,}+"),
    _Rule("Dynatrace", "API token", r"dt0[a-z]\d\d\.[A-Za-z0-9]{24}\.[A-Za-z0-9]{60,}+"),
    _Rule("EasyPost", "live and test keys", r"EZ[AT]K[A-Za-z0-9]{50,}+"),
    _Rule("Facebook", "app and page tokens", r"\d{15,16}(?:\||%7C)[\w-]{27,}+|EAA[MC][A-Za-z0-9]{90,}+"),
    _Rule("Figma", "personal token", r"fig[dou][rh]?_[\w-]{36,}+"),
    _Rule("Flutterwave", "secret key", r"FLWSECK(?:_TEST)?-[A-Za-z0-9]{12,}+(?:-X)?"),
    _Rule("Fly.io", "machine and access tokens", r"fo1_[\w-]{40,}+|fm[12][ar]?_[\w+/=-]{90,}+"),
    _Rule("Frame.io", "API token", r"fio-u-[\w=-]{60,}+"),
    _Rule("GitHub", "personal, OAuth, app and refresh tokens", r"gh[pousr]_[A-Za-z0-9]{30,}+|github_pat_\w{60,}+"),
    _Rule("GitLab", "tokens of every kind", r"gl(?:agent|cbt|dt|ffct|ft|imt|oas|pat|ptt|rtr?|soat|wt)-[\w-]{18,}+"),
    _Rule("GitLab runner", "registration token", r"GR1348941[\w-]{18,}+"),
    _Rule("GoCardless", "live token", r"live_(?=[\w-]{0,40}\d)[\w=-]{40,}+"),
    _Rule("Google", "API key, OAuth client secret", r"AIza[\w-]{33,}+|GOCSPX-[\w-]{24,}+"),
    _Rule("Google OAuth", "access and refresh tokens", r"ya29\.[\w.-]{20,}+|1//0[\w-]{40,}+"),
    _Rule("Grafana", "cloud and API tokens", r"glc_[\w+/=-]{32,}+|eyJrIjoi[A-Za-z0-9]{60,}+=*+"),
    _Rule("Grafana account", "service account token", r"glsa_[A-Za-z0-9]{32}_[A-Fa-f0-9]{8}"),
    _Rule("Groq", "API key", r"gsk_[A-Za-z0-9]{40,}+"),
    _Rule("Harness", "personal and service tokens", r"[ps]at\.[\w-]{22}\.[A-Za-z0-9]{24}\.[A-Za-z0-9]{20,}+"),
    _Rule("Heroku", "API key", r"HRKU-AA[\w-]{50,}+"),
    _Rule("HubSpot", "private app token", r"pat-(?:na|eu)\d-[a-f0-9]{8}(?:-[a-f0-9]{4}){3}-[a-f0-9]{12}"),
    _Rule("Hugging Face", "user and organisation tokens", r"(?:hf|api_org)_[A-Za-z0-9]{30,}+"),
    _Rule("Infracost", "API token", r"ico-[A-Za-z0-9]{32,}+"),
    _Rule("JSON web token", "signed or encrypted", r"(?<![\w-])eyJ[\w-]{10,}+\.[\w-]{10,}+(?:\.[\w-]++){0,3}+"),
    _Rule("LangSmith", "personal and service keys", r"lsv2_(?:pt|sk)_[a-f0-9]{32}_[a-f0-9]{10}"),
    _Rule("Linear", "API and OAuth tokens", r"lin_(?:api|oauth)_[A-Za-z0-9]{36,}+"),
    _Rule("Mailchimp", "API key", r"[0-9a-f]{32}-us\d{1,2}"),
    _Rule("Mailgun", "private key", r"key-[0-9a-f]{32}"),
    _Rule("Mapbox", "secret token", r"[st]k\.eyJ[\w-]{20,}+\.[\w-]{16,}+"),
    _Rule("MaxMind", "license key", r"[A-Za-z0-9]{6}_[A-Za-z0-9]{29}_mmk"),
    _Rule("Microsoft Teams", "incoming webhook", r"(?<=\.webhook\.office\.com/webhookb2/)[\w@/-]{60,}+"),
    _Rule("New Relic", "user, insert, ingest and browser keys", r"NR(?:AK|II|AL|JS|BR|RA)-[\w-]{18,}+"),
    _Rule("Notion", "integration token", r"ntn_[A-Za-z0-9]{40,}+|secret_[A-Za-z0-9]{43}"),
    _Rule("npm", "access token", r"npm_[A-Za-z0-9]{34,}+"),
    _Rule("NuGet", "API key", r"oy2[a-z0-9]{43}"),
    _Rule("Octopus Deploy", "API key", r"API-[A-Z0-9]{26,}+"),
    _Rule("OpenShift", "user token", r"sha256~[\w-]{40,}+"),
    _Rule("Perplexity", "API key", r"pplx-[A-Za-z0-9]{40,}+"),
    _Rule("Pinecone", "API key", r"pcsk_\w{40,}+"),
    _Rule("Plaid", "access token", r"access-(?:sandbox|development|production)-[0-9a-f]{8}(?:-[0-9a-f]{4,12}){4}"),
    _Rule("PlanetScale", "token, OAuth token and password", r"pscale_(?:tkn|oauth|pw)_[\w=.-]{30,}+"),
    _Rule("PostHog", "personal key", r"phx_[A-Za-z0-9]{30,}+"),
    _Rule("Postman", "API key", r"PMAK-[A-Fa-f0-9]{24}-[A-Fa-f0-9]{30,}+"),
    _Rule("Prefect", "user token", r"pnu_[A-Za-z0-9]{34,}+"),
    _Rule("Pulumi", "access token", r"pul-[a-f0-9]{38,}+"),
    _Rule("PyPI", "upload token", r"pypi-AgE[\w-]{40,}+"),
    _Rule("ReadMe", "API key", r"rdme_[a-z0-9]{60,}+"),
    _Rule("Replicate", "API token", r"r8_[A-Za-z0-9]{34,}+"),
    _Rule("Resend", "API key", r"re_[A-Za-z0-9]{8}_[A-Za-z0-9]{20,}+"),
    _Rule("RubyGems", "API key", r"rubygems_[a-f0-9]{44,}+"),
    _Rule("Scalingo", "API token", r"tk-us-[\w-]{44,}+"),
    _Rule("SendGrid", "API key", r"SG\.[\w=-]{16,}+\.[\w=-]{16,}+"),
    _Rule("Sendinblue", "API and SMTP keys", r"x(?:key|smtp)sib-[a-f0-9]{60,}+-[A-Za-z0-9]{14,}+"),
    _Rule("Sentry", "organisation and user tokens", r"sntrys_[\w+/=-]{50,}+|sntryu_[a-f0-9]{60,}+"),
    _Rule("SettleMint", "access tokens", r"sm_[aps]at_[A-Za-z0-9]{16,}+"),
    _Rule("Shippo", "live and test tokens", r"shippo_(?:live|test)_[a-fA-F0-9]{36,}+"),
    _Rule("Shopify", "app, custom app and shared secrets", r"shp(?:at|ca|pa|ss)_[a-fA-F0-9]{30,}+"),
    _Rule("Slack", "bot, user, app and session tokens", r"xox[a-z][.-](?=[\w.-]{0,40}\d)[\w.-]{10,}+|xapp-[\w-]{20,}+"),
    _Rule("Slack webhook", "whoever has it can post", r"(?<=hooks\.slack\.com/)[a-z]++/[\w/+-]{30,}+"),
    _Rule("SonarQube", "user, project and global tokens", r"sq[apu]_[a-f0-9]{40}"),
    _Rule("Sourcegraph", "access token", r"sgp_(?:(?:[a-fA-F0-9]{16}|local)_)?[a-fA-F0-9]{40}"),
    _Rule("Square", "access token", r"(?:EAAA|sq0(?:atp|csp)-)[\w-]{22,}+"),
    _Rule("Stripe", "secret and restricted keys", r"[sr]k_(?:live|test|prod)_[A-Za-z0-9]{10,}+|sk_[a-f0-9]{40,}+"),
    _Rule("Stripe webhook", "signing secret; others use the form too", r"whsec_[\w+/=-]{20,}+"),
    _Rule("Supabase", "access token, secret key", r"sbp_[a-f0-9]{38,}+|sb_secret_[\w-]{20,}+"),
    _Rule("Tailscale", "keys of every kind", r"tskey-[a-z]{2,12}-[\w-]{16,}+"),
    _Rule("Telegram", "bot token", r"(?:bot)?\d{5,16}:A[\w-]{32,}+"),
    _Rule("Terraform Cloud", "user and organisation tokens", r"[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{50,}+"),
    _Rule("Twilio", "API key", r"SK[0-9a-fA-F]{32}"),
    _Rule("Typeform", "personal token", r"tfp_[\w.=-]{40,}+"),
    _Rule("Vault", "service, batch and recovery tokens", r"hv[sbr]\.[\w-]{24,}+|s\.(?=\w{0,23}\d)[A-Za-z0-9]{24}"),
    _Rule("xAI", "API key", r"xai-[A-Za-z0-9]{60,}+"),
    _Rule("Yandex", "API and static keys", r"AQVN[\w-]{35,}+|t1\.[\w-]{20,}+=*+\.[\w-]{80,}+=*+"),
    _Rule("Zapier webhook", "whoever has it can post", r"(?<=hooks\.zapier\.com/hooks/catch/)\d{4,}+/\w{5,}+"),
)

# -------------------------------------------------------------------------------------------------------------- engine


class _Compiled(NamedTuple):
    rules: tuple[re.Pattern[str], ...]
    names: re.Pattern[str]  # a group for each row
    plain: tuple[re.Pattern[str], ...]
    odd: tuple[re.Pattern[str], ...]
    values: dict[str | None, re.Pattern[str]]  # by opening quote
    spares: re.Pattern[str]
    word_break: re.Pattern[str]


@cache
def _compiled() -> _Compiled:
    """Gives the tables as patterns, on first use: a program that redacts nothing does not wait for them."""
    # One alternation for each long table, so that a text is walked once for all of its rows.
    commands = "|".join(rule.pattern for rule in _COMMANDS)
    tokens = "|".join(rule.pattern for rule in _TOKENS)
    names = "|".join(f"({name.pattern})" for name in _NAMES)
    spares = "|".join(spare.pattern for spare in _SPARES)
    return _Compiled(
        rules=(
            *(re.compile(rule.pattern) for rule in _LABELLED),
            re.compile(rf"(?<![\w-])(?:{commands}){_QUOTE}"),
            re.compile(rf"(?<![A-Za-z0-9])(?P<secret>{tokens})(?![A-Za-z0-9])", re.ASCII),
        ),
        names=re.compile(rf"(?:{names}){_QUALIFIER}\Z"),
        plain=tuple(re.compile(name.plain) for name in _NAMES),
        odd=tuple(re.compile(name.odd) for name in _NAMES),
        values={quote: re.compile(pattern) for quote, pattern in _VALUES.items()},
        spares=re.compile(spares),
        word_break=re.compile(r"[\W_]++|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"),
    )


def _row(name: str) -> int | None:
    """Gives the row of the names to which a name belongs, None where it announces no secret at all."""
    words = _compiled().word_break.sub("_", name).strip("_").lower()
    row = _compiled().names.search(words)
    return row.lastindex - 1 if row and row.lastindex else None


def _secret(found: re.Match[str]) -> tuple[int, int] | None:
    """Gives the span of the secret that a rule leads to, None where there is none after all."""
    tables, groups = _compiled(), found.re.groupindex
    row = None
    if "name" in groups:
        row = _row(found["name"])
        if row is None:
            return None
    if "secret" not in groups:
        value = tables.values[found["quote"]].match(found.string, found.end())
        if value is None:
            return None
        found = value
    secret = found["secret"]
    is_odd = row is not None and tables.odd[row].fullmatch(secret)
    is_plain = row is not None and tables.plain[row].fullmatch(secret)
    return None if is_plain or (tables.spares.fullmatch(secret) and not is_odd) else found.span("secret")


def _apply(rule: re.Pattern[str], text: str) -> tuple[str, int]:
    """Gives a text without what one rule finds, and how much that was."""
    pieces: list[str] = []
    at = kept = 0
    while found := rule.search(text, at):
        at = found.end()
        if span := _secret(found):
            pieces += text[kept : span[0]], _MARK
            at = kept = span[1]
    return "".join((*pieces, text[kept:])), len(pieces) // 2


def redact(text: str) -> tuple[str, int]:
    """Gives a text with `«redacted»` in the place of each secret, and how many there were.

    Names and commands stay, so that a line can still be read: `API_KEY=«redacted» make deploy`.
    """
    count = 0
    for _ in range(_PASSES):
        found = 0
        for rule in _compiled().rules:
            text, more = _apply(rule, text)
            found += more
        count += found
        if not found:
            break
    return text, count
