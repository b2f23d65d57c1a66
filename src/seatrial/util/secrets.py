"""Finds secrets by the name of their variable, option or key, by their form and by their value, and replaces them."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

from seatrial.util.text import INVISIBLE

REDACTED = "REDACTED"
PRIVATE = 0o600  # mode of the files from which the job reads its secrets

_AHEAD = 200  # characters after a name that decide whether a value follows; bounds the time for a long line
_MIN_CHARACTERS = 8  # a shorter value can occur in other text by chance, so it is replaced only beside its name
# Whole parts of a name between underscores, and words at the end of a part, such as PGPASSWORD
_SECRET_NAME = re.compile(
    r"(?:(?:^|_)(?:AUTH|AUTHORIZATION|CLIENT_KEY_DATA|CONN(?:ECTION)?_STR(?:ING)?|COOKIE|CREDENTIALS?|CREDS?"
    r"|DOCKERCONFIGJSON|DSN|JWT|KEY|(?:DB|SSH)?PASS|PAT|PW|PWD|WEBHOOK|X_(?:AMZ|GOOG)_SIGNATURE"
    r"|(?:ACCESS|API|AUTH|GITHUB|GITLAB|HF|REFRESH)_TOKENS)|PASSWORDS?|PASSWD|PASSPHRASE|PASSCODE|SECRETS?|TOKEN|API_?KEYS?)\d*(?=_|$)"
)
# Names that describe a secret without containing it, and special tokens of tokenizers
_OTHER_NAME = re.compile(
    r"^PWD$|(?:^|_)(?:CACHE|P|PARTITION|PUBLIC|SORT|STEP)_KEY$"
    r"|(?:^|_)(?:BOS|CLS|EOS|FIRST|IMAGE|MASK|NEXT|PAD|PER|SEP|UNK)_TOKEN$|(?<!SECRET)_IDS?$"
    r"|(?<!WEBHOOK)_(?:URL|URI)$|_(?:ALGORITHM|BITS|BYTES|COLUMN|COUNT|DIR|ENABLED|ENDPOINT|FIELD|FILE|FOLDER|FORMAT"
    r"|HOST|INDEX|INFO|ERROR|EXCEPTION|LENGTH|METHOD|MODE|NAME|PATH|PLUGIN|PORT|PROVIDER|SERVER|SIZE|SOCK|SOCKET|TIMEOUT|TTL|TYPES?"
    r"|USER|USERNAME|VERSION)$"
)
_INVISIBLE = re.compile(f"[{INVISIBLE}]+")
_WORD_BORDER = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z])(?=[A-Z])")
_COMMON_WORDS = {"AUTH", "KEY", "PASS", "PAT", "PW", "TOKEN"}  # names that also occur in other text
# Sources: documentation of Hugging Face, GitHub, AWS, GitLab, Slack, OpenAI, NVIDIA NGC, Docker, npm, PyPI, Google,
# Azure and Weights & Biases, and RFC 7519 (JWT)
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{16,}|sk-(?=[\w-]{0,80}\d[A-Za-z])[\w-]{20,}|nvapi-[\w-]{20,}|dckr_pat_[\w-]{16,}"
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|AIza[\w-]{35}|wandb_v1_\w{20,}|(?<!-)eyJ[\w-]{4,}\.eyJ[\w-]{4,}\.[\w-]*)"
    r"|(?<=hooks\.slack\.com/services/)[\w/]{8,}"
    r"|(?<=[?&;]sig=)[\w%+/=-]{16,}|(?<=u0026sig=)[\w%+/=-]{16,}|(?<=\bSignature=)[\w%+/=-]{32,}"  # of a signed request
    # user:password, or a token, in a URL; a password may contain "@" and "/", which may also follow a port
    r"|(?<=://)(?<!rdma://)(?:[^\s/@:[]*:(?!\d{1,5}/|[\w.-]+@sha256:)(?:[^\s/\"'<>]*(?:/(?!/)[^\s/\"'<>]*)*|[^\s/]*)"
    r"|(?!REDACTED)[^\s/@:]{16,})(?=@)"
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)"
    r"|(?:^[A-Za-z0-9+/=]++\s++)++(?:-----END [A-Z0-9 ]*PRIVATE KEY-----)?",  # its start is cut off, or other text
    re.DOTALL | re.MULTILINE,
)
_AUTHORIZATION = re.compile(  # RFC 9110
    r"(?:(?P<header>\bauthorization[\"']?\s*[:=]\s*[\"']?)(?:\w+\s+)?|\b(?P<scheme>bearer|basic)\s+)(?P<value>[\w.~+/=-]{8,})",
    re.IGNORECASE,
)
_LOGIN = re.compile(  # a line of netrc, an option of curl, and logins of Weights & Biases with messages about its key
    r"(?:\blogin\s+\S+\s+password\s+(?!(?:is|was)\b)|^[ \t]*password[ \t]+(?=\S+$)"
    r"|(?<!\S)(?:-u|--user)[ =][\w.@-]+:)(?P<value>\S+)"
    r"|\blogin\((?:[^()\n]{0,200}[,\s])?key\s*=\s*\\?[\"'](?P<key>[^\s\"'\\]+)"
    r"|\b(?:wandb login(?: --\S+)*|API key(?: must be .{0,40}yours was \d+| is| was)?[:=,.]?)\s{1,3}[\"'`]?"
    r"(?P<bare>(?=[A-Za-z]*\d)[A-Za-z0-9]{32,})",
    re.MULTILINE,
)
_IS = re.compile("(?:is|was)")
# A name before ``=``, ``is``, ``:`` (JSON, YAML, a header) or ``"value":`` (Kubernetes), or of an option before a space
_NAME = re.compile(
    r"(?:(?P<start>^(?:export |declare -x )?)|(?P<quote>\\?[\"\'])|(?<![\w.-]))(?P<dashes>--?)?"
    rf"(?P<name>[A-Za-z_][\w.-]*+)(?P<sign>=|[ \t]+=[ \t]*(?!=)|[ \t]+{_IS.pattern}(?::[ \t]*|[ \t]+)"
    r"|(?P<close>\\?[\"\'])?(?:,?\s*\\?[\"\']?value\\?[\"\']?)?[ \t]*:[ \t]*|(?(dashes)[ \t]+|(?!)))"
    r"(?P<list>\[(?=\\?[\"\']))?",
    re.MULTILINE,
)
_WORD = re.compile(r"(?P<open>\\?[\"\'])(?P<quoted>[^\n]*?)(?:(?P=open)|\Z)|(?P<word>[^\s\"\']+)")
_PLACEHOLDER = re.compile(  # a variable of a shell or a template, an ellipsis, a short number, or a word
    rf"[(\[]*(?:{REDACTED}|\$[({{]|<[^<>]*>|\{{\w*\}}|%\(|(?:\$[A-Za-z_]+|\$[A-Z0-9_]+|\*+|\.\.\.|…|[+-]?\d{{0,5}}(?:\.\d*)?"
    r"|(?i:true|false|none|null|yes|no|disabled|offline|online))(?![^\s,;)\]}\"']))"
)
_RANDOM = re.compile(r"(?=.*[a-z])(?=.*[A-Z])(?=.*\d)(?:[^/]{16,}|[A-Za-z0-9+/=]{32,})")
_RANDOM_KEY = re.compile(r"(?=.*[a-z])(?=.*[A-Z])(?=.*\d)(?:[A-Za-z0-9+=-]{20,}|[A-Za-z0-9+/=]{40,})")
_LONG_LINE = re.compile(r"^[ \t]*((?!-----)\S.{15,})$", re.MULTILINE)  # without markers such as BEGIN PRIVATE KEY
_ORDINARY = re.compile(  # a number, a word, a host or a device such as mlx5_0:1, or a PCI address
    r"[+-]?[\d._]+(?:[eE][+-]?\d+)?|[a-z]{1,15}|[a-z]+\d?(?:[-_][a-z]+)*[-_]?\d{1,5}(?::\d+)?|[\dA-Fa-f:]{5,14}\.\d"
)


@lru_cache(10_000)
def is_secret_name(name: str) -> bool:
    """Return whether the value of a variable, option or key with this name is a secret."""
    words = _WORD_BORDER.sub("_", name).upper().strip("_")
    return bool(_SECRET_NAME.search(words)) and not _OTHER_NAME.search(words)


def secret_values(*documents: Any, vocabulary: Collection[str] = ()) -> dict[str, str]:
    """Return the secrets in JSON documents and in the environment of this process: value → name; a form has none.

    With the password of USER:PASSWORD, and with each long line, before which a launcher can print a prefix. Without
    values that occur in other text: shorter than _MIN_CHARACTERS, paths, ordinary words, ``vocabulary``, and the words
    of the documents outside variables and options. Variables are in mappings with the key ``env``, at any depth.
    """
    redaction = _Redaction({})
    redaction.redact([{"env": dict(os.environ)}, *documents])
    words = {*vocabulary, *_words(documents)}
    return {
        part: name
        for value, name in redaction.found.items()
        for part in (value, unquote(value.rstrip(":").split(":", 1)[-1]), *_LONG_LINE.findall(value))
        if len(part) >= _MIN_CHARACTERS
        and part not in words
        and not (_is_path(part) or _ORDINARY.fullmatch(part) or _PLACEHOLDER.match(part))
    }


def redacted(document: Any, values: Mapping[str, str] | None = None) -> Any:
    """Return a JSON document, or a text, in which REDACTED replaces secrets, with the name if it is not beside it.

    Secrets are values of variables, options and keys with a secret name, values with the form of a secret, and
    ``values`` (value → name). Tuples stay tuples.
    """
    return _Redaction(values or {}).redact(document)


class _Redaction:
    """Redacts documents. ``found``: the secrets that names and forms revealed, each with its name."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.found: dict[str, str] = {}
        self._names = {form: name for value, name in values.items() for form in _printed_forms(value)}
        longest_first = sorted(self._names, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def redact(self, document: Any) -> Any:
        if isinstance(document, str):
            return self._text(document)
        if isinstance(document, Mapping):
            names = {"value": document["name"]} if "name" in document else {}  # as variables of Kubernetes
            return {key: self._entry(names.get(key, key), value) for key, value in document.items()}
        if isinstance(document, list | tuple):
            return type(document)(self._items(document))
        return document

    def _entry(self, key: Any, value: Any) -> Any:
        if key == "env" and isinstance(value, Mapping):
            return {name: self._variable(str(name), text) for name, text in value.items()}
        if isinstance(value, list | tuple) and is_secret_name(singular := str(key).rstrip("sS")):
            return type(value)(self._entry(singular, item) for item in value)
        is_word = isinstance(value, str) and len(value) >= _MIN_CHARACTERS and not re.search(r"\s", value)
        is_variable = is_word and (str(key).upper() not in _COMMON_WORDS or _RANDOM_KEY.fullmatch(value))
        return self._variable(str(key), value) if is_variable else self.redact(value)

    def _items(self, items: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
        option = ""
        for item in items:
            if option and isinstance(item, str) and not item.startswith("-") and not _PLACEHOLDER.match(item):
                yield self._replaced(item, option)
            else:
                yield self.redact(item)
            option = item.lstrip("-") if isinstance(item, str) and _is_secret_option(item) else ""

    def _variable(self, name: str, value: Any) -> Any:
        is_secret = isinstance(value, str) and value and is_secret_name(name) and not _is_path(value)
        return self.redact(value) if not is_secret or value.startswith(REDACTED) else self._replaced(value, name)

    def _text(self, text: str) -> str:
        """Return the text with secrets replaced; if it has any, without invisible characters, which may part them."""
        visible = _INVISIBLE.sub("", text)
        replaced = self._visible_text(visible)
        return text if replaced == visible else replaced

    def _visible_text(self, text: str) -> str:
        if self._known:
            text = self._known.sub(lambda match: f"{REDACTED}({self._names[match[0]]})".removesuffix("()"), text)
        if "PRIVATE KEY-----" in text:
            text = _PRIVATE_KEY.sub(
                lambda match: self._replaced(match[0]) + "(private key)" if "-----" in match[0] else match[0], text
            )
        text = _AUTHORIZATION.sub(self._authorization, text)
        text = _LOGIN.sub(self._replaced_group, text)
        text = _TOKEN.sub(lambda match: self._replaced(match[0]), text)
        return self._named_values(text)

    def _replaced(self, value: str, name: str = "") -> str:
        self.found.setdefault(value.strip(), name)
        return REDACTED

    def _replaced_group(self, match: re.Match[str]) -> str:
        """Return the text of the match with its last group, which ends it, replaced."""
        value = match[match.lastgroup or 0]
        return match[0] if _PLACEHOLDER.match(value) else match[0].removesuffix(value) + self._replaced(value)

    def _authorization(self, match: re.Match[str]) -> str:
        scheme, value = (match["scheme"] or "").lower(), match["value"]
        is_prose = (scheme == "basic" and not _has_password(value)) or (scheme == "bearer" and value.isalpha())
        return match[0] if is_prose else self._replaced_group(match)

    def _named_values(self, text: str) -> str:
        pieces, done = [], 0
        for match in _NAME.finditer(text):
            name = match["name"].rstrip("sS") if match["list"] else match["name"]
            is_secret = is_secret_name(name) or _is_secret_option(match[0].strip("\\\"'= "))
            if match.start() >= done and is_secret and (span := _value_span(text, match, name)):
                pieces += [text[done : span[0]], self._replaced(text[slice(*span)], match["name"])]
                done = span[1]
        return "".join([*pieces, text[done:]])


def _is_secret_option(argument: str) -> bool:
    return argument == "--wandb" or bool(re.fullmatch(r"--[A-Za-z][\w.-]*", argument) and is_secret_name(argument))


def _value_span(text: str, match: re.Match[str], name: str) -> tuple[int, int] | None:
    """Return begin and end of the value after a secret name; None if it is a path, a placeholder or other text."""
    begin, sign, encloses = match.end(), match["sign"], match["quote"] and not match["close"]
    ahead = text[begin : begin + _AHEAD]
    value = word["word"] or word["quoted"] if (word := _WORD.match(ahead)) else ""
    if not value or _PLACEHOLDER.match(value) or _is_path(value) or (sign.isspace() and value.startswith("-")):
        return None
    rest = value if match["list"] else ahead.partition(match["quote"] if encloses else "\n")[0]
    is_field = match["dashes"] or (match["close"] and not match["list"] and name.upper() != "KEY")
    if (not is_field or _IS.search(sign)) and _is_prose(name, sign, rest):
        return None
    # to the quote that encloses name and value ('NAME=two words'), or to the end of the line, as in the output of env
    is_line = "=" in sign and match["start"] is not None and not match["dashes"]
    if closing := "]" if match["list"] else match["quote"] if encloses else "\n" if is_line else "":
        end = text.find(closing, begin)
        return begin, end if end >= 0 else len(text)
    word = _WORD.match(text, begin)
    return word.span("word" if word["word"] else "quoted") if word else None


def _is_prose(name: str, sign: str, rest: str) -> bool:
    """Return whether the rest of the line after a secret name is a sentence instead of a value.

    Then several words follow a colon, an ordinary word or a result follows a colon or a common name, or words or a
    number follow "is".
    """
    first, *others = rest.split() or [""]
    word = first.strip("'\".,;)]}")
    if name.upper() in ("KEY", "PASS"):
        return not _RANDOM_KEY.fullmatch(word)
    if name.upper() in _COMMON_WORDS and len(word) < 16:
        return len(word) < 6 or not re.search(r"\d.*[A-Za-z]|[A-Za-z].*\d", word) or (":" in sign and bool(others))
    if _IS.search(sign):
        return bool(re.fullmatch(r"[A-Za-z'/_.-]*|\d*", word))
    return ":" in sign and (bool(others) or (word.isalpha() and len(word) < 16))


def _printed_forms(value: str) -> set[str]:
    """Return the value as it is, in JSON, in quotes of a shell, and in a URL, without invisible characters."""
    value = _INVISIBLE.sub("", value)
    in_shell = shlex.quote(value)
    return {value, json.dumps(value)[1:-1], in_shell[1:-1] if in_shell != value else value, quote(value, safe="")}


def _has_password(text: str) -> bool:
    """Return whether the text is USER:PASSWORD in base64 (RFC 7617)."""
    try:
        return b":" in base64.b64decode(text, validate=True)
    except ValueError:
        return False


def _is_path(value: str) -> bool:
    """Return whether each part of the value between colons is a path. A random text can begin with a slash too."""
    return all(re.match(r"(?:~|\.{1,2})?/", part) and not _RANDOM.search(part[:_AHEAD]) for part in value.split(":"))


def _words(document: Any) -> Iterator[str]:
    """Yield the keys and values of a document outside variables and options."""
    if isinstance(document, str):
        yield document
    elif isinstance(document, Mapping):
        for key, value in document.items():
            yield str(key)
            if key not in ("env", "options"):
                yield from _words(value)
    elif isinstance(document, list | tuple):
        for item in document:
            yield from _words(item)
