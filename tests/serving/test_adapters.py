"""LoRA adapters by name: samples of one batch, each as its own merged model samples it."""

import contextlib
import dataclasses

import httpx
import jax
import numpy as np
import pytest
import serving_model
import tiny
from engine_work import NETWORKS

from jaxrl_llm import saved_policy
from jaxrl_llm.config import LoraConfig, SpeculationConfig
from jaxrl_llm.models import lora
from jaxrl_llm.models.hf import peft_adapter
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import AdapterSlot, Request, RequestError, SamplingParams
from jaxrl_llm.rollout.engine_api import EngineArgs
from jaxrl_llm.serving import server
from jaxrl_llm.serving.adapters import AdapterError, AdapterPool
from jaxrl_llm.serving.app import make_app
from jaxrl_llm.serving.driver import Driver
from jaxrl_llm.serving.metrics import Metrics

CONFIGS = {
    "attention": LoraConfig(rank=3, alpha=5.0, targets=("q", "v")),
    "mlp": LoraConfig(rank=2, alpha=16.0, targets=("gate", "up", "down")),
    "all": LoraConfig(rank=1, alpha=2.0),
}
NAMES = ("", *CONFIGS)  # "": the base model


def random_adapters(network, seed):
    shapes = network.abstract_adapters()
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda a: random.normal(0, 0.3, a.shape).astype(a.dtype), shapes)


def write_adapters(folder, network):
    """Writes each adapter of `CONFIGS` as peft does; returns folders and merged weights by name."""
    folders, merged = {}, {"": tiny.params(network)}
    for seed, (name, config) in enumerate(CONFIGS.items()):
        adapted = dataclasses.replace(network, lora=config)
        adapters = random_adapters(adapted, seed)
        peft_adapter.save(folder / name, adapted, adapters)
        folders[name] = str(folder / name)
        tree = lora.combine_params(tiny.params(network), adapters)
        merged[name] = jax.jit(lora.merge_adapters, static_argnums=1)(tree, config.scale)
    return folders, merged


def engine_on(mesh, network, **settings):
    args = {"num_slots": 8, "max_tokens": 64, "chunk_steps": 4, "layout": "tensor", **settings}
    return Engine(network, mesh, **args)


def workload(adapters):
    """Requests of every model, alternating; prompts of two lengths, and a group of two samples."""
    random = np.random.default_rng(1)
    shared = random.integers(4, 96, 9).tolist()
    requests = []
    for i in range(12):
        prompt = shared + random.integers(4, 96, 1 + 17 * (i % 2)).tolist()
        params = (SamplingParams(10, temperature=float(i % 3 > 0)),) * (1 + (i == 3))
        keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(i), len(params))))
        requests.append(Request(tuple(prompt), keys, params, adapter=adapters[i % len(adapters)]))
    return requests


ON_MESHES = [
    {},
    pytest.param({"tensor": 2}, marks=pytest.mark.slow),
    pytest.param({"fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("sizes", ON_MESHES)
def test_each_sample_of_a_mixed_batch_is_that_of_its_merged_model(tmp_path, sizes):
    mesh, network = tiny.make_mesh(**sizes), tiny.NETWORK
    folders, merged = write_adapters(tmp_path, network)
    args = EngineArgs(network, mesh, num_slots=8, max_tokens=64, layout="tensor")
    pool = AdapterPool("base", network, args, folders)
    assert (pool.num_places, pool.rank) == (3, 3)
    params = pool.set_base(tiny.rollout_params(merged[""], mesh))
    slots = [None, *(adapter.slot for adapter in pool.adapters)]
    requests = workload(slots)
    plain = engine_on(mesh, network)
    expected = {}
    for name, weights in merged.items():
        unadapted = [dataclasses.replace(request, adapter=None) for request in requests]
        expected[name] = plain.generate(tiny.rollout_params(weights, mesh), unadapted)
    speculation = SpeculationConfig(draft_tokens=2, ngram_tokens=1)
    for settings in ({}, {"prefix_caching": True}, {"speculation": speculation}):
        engine = engine_on(mesh, pool.network, **settings)
        for _ in range(1 + engine.prefix_caching):  # again: prompts are in the cache
            for i, completions in enumerate(engine.generate(params, requests)):
                for completion, wanted in zip(completions, expected[NAMES[i % 4]][i], strict=True):
                    assert completion.tokens == wanted.tokens, (settings, i)
                    np.testing.assert_allclose(
                        completion.log_probs, wanted.log_probs, atol=2e-5, err_msg=str(i)
                    )
    with pytest.raises(RequestError, match="adapter 4; this engine has 3"):
        engine.generate(params, [dataclasses.replace(requests[0], adapter=AdapterSlot(4))])
    differing = {tuple(expected[name][0][0].log_probs) for name in NAMES}
    assert len(differing) == 4  # the adapters do change what is sampled


def test_an_adapter_that_does_not_fit_is_refused_before_weights_are_read(tmp_path):
    network, mesh = tiny.NETWORK, tiny.make_mesh()
    folders, _ = write_adapters(tmp_path, network)
    args = EngineArgs(network, mesh, num_slots=8, max_tokens=64, layout="tensor")
    with pytest.raises(AdapterError, match="rank 3, the places of this server have 2; start"):
        AdapterPool("base", network, args, folders, rank=2)
    with pytest.raises(AdapterError, match="3 adapters for 2 places; raise --max_adapters"):
        AdapterPool("base", network, args, folders, 2)
    with pytest.raises(AdapterError, match="'all': the model itself has this name"):
        AdapterPool("all", network, args, folders)
    wider = tiny.with_sizes(hidden_size=40)
    pool = AdapterPool("base", wider, dataclasses.replace(args, network=wider), folders)
    with pytest.raises(peft_adapter.CheckpointFormatError, match=r"q_proj.lora_A.weight is F32"):
        pool.set_base(tiny.rollout_params(tiny.params(wider), mesh, wider))
    latents = dataclasses.replace(network, shape=NETWORKS["latents"])
    with pytest.raises(AdapterError, match="not for latent attention"):
        AdapterPool("base", latents, dataclasses.replace(args, network=latents), folders)


@contextlib.contextmanager
def serving(folder, sources, num_places):
    """A client of a real engine with places for adapters; its pool and driver."""
    serving_model.make_folder(folder / "model")
    source = saved_policy.policy_from_model(saved_policy.sampling_config(str(folder / "model")))
    served = server.served_model(source, "base")
    args = source.sampler.engine_args
    pool = AdapterPool("base", source.models.policy.decoder, args, sources, num_places, 4)
    engine = server.make_engine(source, served, 4, network=pool.network)
    driver = Driver(engine, pool.set_base(source.weights().params), max_waiting=8)
    pool.connect(driver.update_weights)
    app = make_app(served, driver, Metrics(driver), adapters=pool)
    with server.local_server(app, driver) as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client, pool


def test_adapters_are_loaded_named_and_unloaded_over_http(tmp_path):
    network = serving_model.network(serving_model.byte_tokenizer())
    folders, _ = write_adapters(tmp_path, network)
    with serving(tmp_path, {"attention": folders["attention"]}, num_places=2) as (http, pool):

        def reply(model, status=200):
            body = {"model": model, "prompt": "The quick", "max_tokens": 8, "temperature": 0}
            response = http.post("/v1/completions", json=body)
            assert response.status_code == status, response.text
            if status != 200:
                return response.json()["error"]["message"]
            assert response.json()["model"] == model
            return response.json()["choices"][0]["text"]

        def load(name, path, status=200):
            response = http.post(
                "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}
            )
            assert response.status_code == status, response.text
            return response.json().get("error", {}).get("message")

        def unload(name, status=200):
            response = http.post("/v1/unload_lora_adapter", json={"lora_name": name})
            assert response.status_code == status, response.text

        base, attention = reply("base"), reply("attention")
        assert base != attention
        assert "'base', 'attention'" in reply("mlp", 404)
        load("mlp", folders["mlp"])
        listed = {each["id"]: each["parent"] for each in http.get("/v1/models").json()["data"]}
        assert listed == {"base": None, "attention": "base", "mlp": "base"}
        assert http.get("/v1/models/mlp").json()["parent"] == "base"
        mlp = reply("mlp")
        assert mlp not in (base, attention)
        assert "loaded already" in load("mlp", folders["mlp"], 400)
        assert "2 of 2 places are used" in load("all", folders["all"], 400)
        assert "No such file" in load("x", str(tmp_path / "nothing"), 400)
        assert "lora_path" in load("x", "", 400)
        with pool.lease("mlp"):  # as a request that runs
            unload("mlp")
            unload("mlp", 404)
            reply("mlp", 404)
            assert "requests of one that was unloaded" in load("all", folders["all"], 400)
        load("all", folders["all"])
        again = reply("all")
        assert again not in (base, mlp)
        # Another adapter in the place of the first: nothing of it is left in the prefix cache.
        unload("attention")
        load("mlp", folders["mlp"])
        assert (reply("mlp"), reply("all"), reply("base")) == (mlp, again, base)
        message = {"role": "user", "content": "Hi"}
        chat = {"model": "mlp", "messages": [message], "max_tokens": 4, "max_output_tokens": 4}
        for path, fields in (
            ("/v1/chat/completions", ("model", "messages", "max_tokens")),
            ("/v1/messages", ("model", "messages", "max_tokens")),
        ):
            response = http.post(path, json={name: chat[name] for name in fields})
            assert response.json()["model"] == "mlp", response.text
        response = http.post("/v1/responses", json={"model": "mlp", "input": "Hi"})
        assert response.json()["model"] == "mlp", response.text
