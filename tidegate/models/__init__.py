"""Models: finding, fetching, checking and converting what a worker serves, up to plain files and facts.

Owns: the catalog, the cache in $XDG_CACHE_HOME/tidegate, reading GGUF headers and OpenVINO IR folders, conversion.
Never does: run a model, tokenize, or import OpenVINO in this process.

    load.resolve_model(spec, progress=True) -> ModelSource     what `serve` and LLM need: everything about one model
    catalog.list_models() -> list[CatalogModel]                `tidegate model list`
    fetch.pull(name, progress=True) -> Path                    `tidegate model pull NAME`: fetched file, verified
    fetch.path(name) -> Path                                   `tidegate model path NAME`: ModelError if not fetched
    fetch.is_fetched(model) -> bool                            whether it is in the cache already

A spec is a catalog name, a .gguf file, a folder with an OpenVINO IR and its tokenizer, or a Hugging Face repo id.
Every mistake is a ModelError: one line that says what to do.
"""

from tidegate.models.catalog import CatalogModel, list_models
from tidegate.models.errors import ModelError
from tidegate.models.source import Architecture, ModelSource, TokenizerSource

__all__ = ["Architecture", "CatalogModel", "ModelError", "ModelSource", "TokenizerSource", "list_models"]
