"""Frozen text encoders with one interface: they turn texts into vectors, once per latent set and
once per sampling. Training never runs them.

Letters: B texts, T tokens of a text, E width of the encoder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from common.condition import TextEncoder
from common.errors import UserError
from common.files import hash_file
from common.libraries import silence_libraries
from common.text import shorten_error
from models.autoencoders import find_folder

TEXT_CLASSES = {
    "clip": "CLIPTextModel",
    "clip_text_model": "CLIPTextModel",
    "t5": "T5EncoderModel",
    "mt5": "MT5EncoderModel",
    "umt5": "UMT5EncoderModel",
}
"""`model_type` in a config of transformers -> class that holds only the text encoder. AutoModel
opens all other types."""
TEXT_FILES = ("*.safetensors", "*.json", "*.model", "*.txt")
HASHED_FILES = (
    "*.safetensors",
    "*.model",
    "config.json",
    "tokenizer*.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
"""Patterns of the files on which vectors depend."""
MAX_TOKENS = 4096
"""Largest number of tokens of a text, for encoders that state no limit."""


def hash_files(files: Sequence[Path]) -> str:
    """Returns one sha256 of several files: their names and contents, in the order of the names."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        digest.update(file.name.encode())
        digest.update(bytes.fromhex(hash_file(file)))
    return digest.hexdigest()


def open_transformers(
    key: str, path: str, revision: str | None = None, kind: str = "", dtype: str = "float32"
) -> tuple[Any, Any, str | None, str]:
    """Opens what the library transformers saved in a folder, or in a repository of the Hugging Face
    hub at the commit `revision`. Returns the frozen model, of the class `kind` or else of that in
    `TEXT_CLASSES`; its tokenizer; the commit, None for a local folder; and one sha256 of all files
    on which vectors depend. Raises UserError, which names the key `key`, if that fails."""
    example = f"'owner/name'; correct {key}, or give a local folder."
    folder, commit = find_folder(key, path, [*TEXT_FILES], example, revision)
    try:
        with silence_libraries():
            import transformers

            model_type = json.loads((folder / "config.json").read_text()).get("model_type")
            model_class = getattr(transformers, kind or TEXT_CLASSES.get(model_type, "AutoModel"))
            model, loading = model_class.from_pretrained(
                folder,
                use_safetensors=True,
                dtype=getattr(torch, dtype),
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except ImportError as error:
        raise UserError(
            f"{key}={path} needs the package transformers: pip install 'fastlatent[text]'."
        ) from error
    except Exception as error:  # transformers raises many kinds of errors
        raise UserError(
            f"{key}={path} cannot be opened by transformers ({shorten_error(error)}); it must hold "
            "config.json, weights in safetensors and a tokenizer."
        ) from error
    # transformers fills weights that are not there at random; BERT's pooler is not used here.
    missing = [key for key in loading["missing_keys"] if "pooler" not in key]
    if missing:
        raise UserError(
            f"{key}={path} lacks {len(missing)} weights of a {type(model).__name__}, such as "
            f"{min(missing)}; give the folder of another model."
        )
    files = [file for pattern in HASHED_FILES for file in folder.glob(pattern) if file.is_file()]
    return model.eval().requires_grad_(False), tokenizer, commit, hash_files(files)


class HubTextEncoder(TextEncoder):
    """A text encoder in the format of the library transformers, such as CLIP, T5, BERT or a
    language model: its last hidden states, and CLIP's own pooled vector, or else their mean.

    `path` is a local folder or a hub id; `revision` pins a hub id to a commit. `dtype` is that of
    the weights. It reads weights from safetensors only, and runs no code of the folder.
    """

    def __init__(
        self,
        path: str,
        revision: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    ) -> None:
        super().__init__()
        self.model, self.tokenizer, self.revision, self.weights_sha256 = open_transformers(
            "text_encoder.path", path, revision, dtype=dtype
        )
        self.kind = type(self.model).__name__
        places = getattr(self.model.config, "max_position_embeddings", MAX_TOKENS)
        self.max_length = min(self.tokenizer.model_max_length, places, MAX_TOKENS)
        try:
            self.width = self.encode(["a"], 1).tokens.shape[2]
        except Exception as error:  # such as that of a model that also needs an image
            raise UserError(
                f"text_encoder.path={path}: {self.kind} gives no vectors of a text alone "
                f"({shorten_error(error)}); take a text encoder."
            ) from error

    def tokenize(self, texts: Sequence[str], whole: bool = False) -> list[list[int]]:
        limit = {} if whole else {"truncation": True, "max_length": self.max_length}
        found = self.tokenizer([*texts], verbose=False, **limit)["input_ids"]
        # Some language models give no token for an empty text.
        end = self.tokenizer.eos_token_id or 0
        return [row or [end] for row in found]

    def compute_vectors(self, numbers: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        output = self.model(input_ids=numbers, attention_mask=mask.long())
        # Take the pooled vector of CLIP only: other models may have been trained without theirs.
        pooled = output.pooler_output if self.kind == "CLIPTextModel" else None
        return output.last_hidden_state, pooled


class WordLlama(TextEncoder):
    """The static vectors of the package wordllama: one vector of 256 values for each of 32,000
    tokens, which no other token changes. It is small enough for a laptop, and needs no download
    beyond its package, but it does not know the order of words."""

    BEGIN = 1
    """Number of the token that begins a text; here it stands for an empty text."""
    max_length = MAX_TOKENS

    def __init__(self) -> None:
        super().__init__()
        found = find_spec("wordllama")
        if found is None or not found.submodule_search_locations:
            raise UserError(
                "text_encoder=wordllama needs the package wordllama: pip install "
                "'fastlatent[text]'."
            )
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        # Read the package's two files, and do not import its code.
        folder = Path(next(iter(found.submodule_search_locations)))
        weights = folder / "weights" / "l2_supercat_256.safetensors"
        vocabulary = folder / "tokenizers" / "l2_supercat_tokenizer_config.json"
        self.tokenizer = Tokenizer.from_file(str(vocabulary))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        (table,) = load_file(weights).values()
        self.table = nn.Embedding.from_pretrained(table.float())
        self.width = table.shape[1]
        self.weights_sha256 = hash_files([weights, vocabulary])

    def tokenize(self, texts: Sequence[str], whole: bool = False) -> list[list[int]]:
        found = self.tokenizer.encode_batch([*texts], add_special_tokens=False)
        return [one.ids[: None if whole else self.max_length] or [self.BEGIN] for one in found]

    def compute_vectors(self, numbers: Tensor, mask: Tensor) -> tuple[Tensor, None]:
        return self.table(numbers), None
