"""Loading and unloading LoRA adapters while the server runs, with vLLM's endpoints."""

import asyncio
from typing import Any

import fastapi
from pydantic import Field

from jaxrl_llm.errors import UserError
from jaxrl_llm.serving.adapters import AdapterNotFoundError, AdapterPool
from jaxrl_llm.serving.fields import Strict
from jaxrl_llm.serving.protocol import ApiError, check_text

_MAX_NAME = 128


class LoadBody(Strict):
    """`POST /v1/load_lora_adapter`."""

    lora_name: str = Field(min_length=1, max_length=_MAX_NAME)
    lora_path: str = Field(min_length=1, max_length=4096)  # a folder, or another address


class UnloadBody(Strict):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str = Field(min_length=1, max_length=_MAX_NAME)


def adapter_routes(adapters: AdapterPool) -> fastapi.APIRouter:
    """The routes that load and unload the adapters of a pool."""
    router = fastapi.APIRouter()

    @router.post("/v1/load_lora_adapter")
    async def load(body: LoadBody) -> dict[str, Any]:
        check_text(body.model_dump())
        loop = asyncio.get_running_loop()
        try:
            adapter = await loop.run_in_executor(
                None, adapters.load, body.lora_name, body.lora_path
            )
        except UserError as error:
            raise ApiError(400, str(error), code="adapter_not_loaded") from error
        return {"id": adapter.name, "object": "model", "root": adapter.address}

    @router.post("/v1/unload_lora_adapter")
    async def unload(body: UnloadBody) -> dict[str, Any]:
        try:
            adapters.unload(body.lora_name)
        except AdapterNotFoundError as error:
            raise ApiError(404, str(error), code="model_not_found", param="lora_name") from error
        return {"id": body.lora_name, "object": "model", "deleted": True}

    return router
