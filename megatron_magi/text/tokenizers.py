"""Tokenizers of corpora: bytes, Llama 3, or a HuggingFace folder. Each is optional but the first.

Special tokens in a text are text: no tokenizer here turns them into their ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """Turns text into ids below `vocab_size`; `eod` ends a document and never comes from text."""

    name: str
    vocab_size: int
    eod: int
    flags: str
    """Flags of Megatron for a model with this tokenizer."""

    def encode(self, text: bytes) -> Ids: ...


def load_tokenizer(choice: str, eod_token: str | None = None) -> Tokenizer:
    """The tokenizer "byte" or "llama3", or the one of a folder with a tokenizer.json.

    Args:
        eod_token: text of the token that ends a document, for a folder. None: what its files call
            EOS.

    Raises:
        ValueError: no such folder, a package or a file is missing, or there is no usable EOD.
    """
    if choice not in ("byte", "llama3"):
        if not Path(choice).exists():
            raise ValueError(
                f"a tokenizer must be byte, llama3 or a folder with a tokenizer.json, got "
                f"{choice!r}, and there is no such folder; take one of these"
            )
        return FolderTokenizer(Path(choice), eod_token)
    if eod_token is not None:
        raise ValueError(
            f"an EOD token is chosen for a tokenizer folder only, got {eod_token!r} for {choice}, "
            f"which has its own; leave it out"
        )
    return ByteTokenizer() if choice == "byte" else Llama3Tokenizer()


class ByteTokenizer:
    """A token is a byte; 256 is EOD. Needs no files and loses nothing."""

    name = "byte"
    vocab_size = 257
    eod = 256
    flags = "--tokenizer-type NullTokenizer --vocab-size 257"

    def encode(self, text: bytes) -> Ids:
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)


class Llama3Tokenizer:
    """The vocabulary of Llama 3, 3.1, 3.2 and 3.3; EOD is <|end_of_text|>. No download.

    Needs the package quicktok-v1, which carries the vocabulary.
    """

    name = "llama3"
    vocab_size = 128_256
    eod = 128_001
    flags = "--tokenizer-type NullTokenizer --vocab-size 128256 --null-tokenizer-eod-id 128001"

    def __init__(self) -> None:
        try:
            import quicktok
        except ImportError:
            raise _package_missing("llama3", "quicktok-v1", "llama3") from None
        self._encoding = quicktok.get_encoding("llama3")
        if self._encoding.n_vocab != self.vocab_size:
            raise ValueError(
                f"the tokenizer llama3 must have {self.vocab_size} tokens, got "
                f"{self._encoding.n_vocab}; install quicktok-v1 0.4.0"
            )

    def encode(self, text: bytes) -> Ids:
        # The batch call gives an array instead of a list.
        ids, _ = self._encoding.encode_batch([_decoded(text)], 1, with_special=False)
        return np.asarray(ids, dtype=np.int64)


class FolderTokenizer:
    """A HuggingFace tokenizer.json; EOD is what the files next to it call EOS. No download.

    Raises:
        ValueError: the package tokenizers or a file is missing, or EOD is unknown or plain text.
    """

    def __init__(self, folder: Path, eod_token: str | None = None) -> None:
        self.flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}"
        self.name = folder.resolve().name
        self._tokenizer = _read_tokenizer(folder)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1
        self.eod = _find_eod(folder, ids, eod_token)
        if self.eod in self.encode(self._tokenizer.id_to_token(self.eod).encode()):
            raise ValueError(
                f"the EOD must be a special token, which no text can spell, got token {self.eod} "
                f"of {folder}; name another one with --eod-token"
            )

    def encode(self, text: bytes) -> Ids:
        encoding = self._tokenizer.encode(_decoded(text), add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int64)


def _read_tokenizer(folder: Path) -> Any:
    try:
        from tokenizers import Tokenizer as FromFile
    except ImportError:
        raise _package_missing(str(folder), "tokenizers", "huggingface") from None
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"a tokenizer must be byte, llama3 or a folder with a tokenizer.json, got {folder} "
            f"and no {path}; check the spelling, or save the tokenizer there"
        )
    try:
        tokenizer = FromFile.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise ValueError(
            f"tokenizer.json must be one that the package tokenizers reads, got {path} ({error}); "
            f"mend the file or install a newer tokenizers"
        ) from None
    # The file may ask for these, but a corpus cannot use them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # takes special tokens as plain text
    return tokenizer


def _find_eod(folder: Path, ids: dict[str, int], chosen: str | None) -> int:
    eod: object = chosen
    for name, key in (
        ("tokenizer_config.json", "eos_token"),
        ("special_tokens_map.json", "eos_token"),
        ("generation_config.json", "eos_token_id"),
        ("config.json", "eos_token_id"),
    ):
        if eod is None:
            eod = _read_json(folder / name).get(key)
    if isinstance(eod, dict):
        eod = eod.get("content")
    if isinstance(eod, int) and eod in ids.values():
        return eod
    if isinstance(eod, str) and eod in ids:
        return ids[eod]
    raise ValueError(
        f"a tokenizer folder must say which one token ends a text (eos_token or eos_token_id in "
        f"its JSON files), got {eod!r} in {folder}; name one of its tokens with --eod-token"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, got {error}; mend or remove it") from None
    return content if isinstance(content, dict) else {}


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")


def _package_missing(choice: str, package: str, extra: str) -> ValueError:
    return ValueError(
        f"the tokenizer {choice} needs the package {package}, got none; "
        f"pip install {package}, or megatron-magi[{extra}]"
    )
