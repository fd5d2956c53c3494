"""Tinker's SDK, unmodified, against the server: every call that trains and samples, and errors."""

import contextlib

import numpy as np
import pytest
import serving_model

from jaxrl_llm import saved_policy
from jaxrl_llm.serving import server
from jaxrl_llm.serving.adapters import AdapterPool
from jaxrl_llm.serving.app import make_app
from jaxrl_llm.serving.driver import Driver
from jaxrl_llm.serving.metrics import Metrics
from jaxrl_llm.serving.training_service import service

tinker = pytest.importorskip("tinker", reason="the package tinker is not installed")
from tinker import types  # noqa: E402

KEY, OTHER_KEY = "tml-one", "tml-two"


@contextlib.contextmanager
def running_service(folder, state, **settings):
    """The URL of a service of a small model; `pool` has 2 places of rank 4."""
    if not (folder / "config.json").exists():
        serving_model.make_folder(folder)
    source = saved_policy.policy_from_model(saved_policy.sampling_config(str(folder)))
    served = server.served_model(source, "base", 64)
    base = service.load_training_base(source, served.max_tokens)
    args = source.sampler.engine_args
    pool = AdapterPool("base", source.models.policy.decoder, args, {}, 2, 4)
    engine = server.make_engine(source, served, 4, network=pool.network)
    driver = Driver(engine, pool.set_base(source.sampler.weights(base.params)), max_waiting=64)
    pool.connect(driver.update_weights)
    app = make_app(served, driver, Metrics(driver), adapters=pool, body_bytes=2**24)
    with (
        service.training_service(
            app, served, driver, pool, base, str(state), tokenizer=str(folder), **settings
        ) as made,
        server.local_server(app, driver) as url,
    ):
        yield url, made


@pytest.fixture(scope="module")
def service_url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    with running_service(folder / "model", folder / "state") as (url, _):
        yield url


def connect(url, key=KEY):
    return tinker.ServiceClient(base_url=url, api_key=key)


@pytest.fixture(scope="module")
def client(service_url):
    with connect(service_url) as made:
        yield made


def datum(tokens, weights=None, **fields):
    weights = [1.0] * (len(tokens) - 1) if weights is None else weights
    inputs = {"target_tokens": list(tokens[1:]), **(fields or {"weights": weights})}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=inputs
    )


TOKENS = [5, 9, 77, 31, 8, 120, 44, 12]
ADAM = types.AdamParams(learning_rate=0.01)


def test_a_client_trains_and_samples(client):
    training = client.create_lora_training_client("base", rank=4, seed=1).result()
    info = training.get_info()
    assert (info.lora_rank, info.is_lora, info.model_data.model_name) == (4, True, "base")
    tokenizer = training.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("over the lazy dog")) == "over the lazy dog"
    data = [datum(TOKENS), datum(TOKENS[2:])]
    before = training.forward(data, "cross_entropy").result()
    losses = []
    for _ in range(5):
        passed = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(ADAM)
        losses.append(passed.result().metrics["loss:sum"])
        assert step.result().metrics["skipped_updates"] == 0.0
    assert losses == sorted(losses, reverse=True) and losses[0] == before.metrics["loss:sum"]
    first = before.loss_fn_outputs[0]["logprobs"]
    assert first.shape == [7] and first.dtype == "float32"
    assert -sum(sum(o["logprobs"].data) for o in before.loss_fn_outputs) == pytest.approx(losses[0])

    sampling = training.save_weights_and_get_sampling_client().result()
    scored = sampling.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    after = training.forward(data, "cross_entropy").result()
    assert scored[0] is None
    np.testing.assert_allclose(scored[1:], after.loss_fn_outputs[0]["logprobs"].data, atol=2e-5)
    prompt = types.ModelInput.from_ints(TOKENS[:4])
    params = types.SamplingParams(max_tokens=6, seed=3, stop=[])
    reply = sampling.sample(
        prompt,
        3,
        params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=2,
    ).result()
    assert len({tuple(s.tokens) for s in reply.sequences}) > 1
    assert {(s.stop_reason, len(s.tokens), len(s.logprobs)) for s in reply.sequences} == {
        ("length", 6, 6)
    }
    assert [None if t is None else len(t) for t in reply.topk_prompt_logprobs] == [None, 2, 2, 2]
    np.testing.assert_allclose(reply.prompt_logprobs[1:], scored[1:4], atol=2e-5)
    again = sampling.sample(prompt, 3, params).result()
    assert [s.tokens for s in again.sequences] == [s.tokens for s in reply.sequences]
    sampled = [*TOKENS[:4], *reply.sequences[0].tokens]
    seen = training.forward([datum(sampled)], "cross_entropy").result()
    np.testing.assert_allclose(
        seen.loss_fn_outputs[0]["logprobs"].data[3:], reply.sequences[0].logprobs, atol=2e-5
    )
    stopped = sampling.sample(
        prompt, 1, types.SamplingParams(max_tokens=6, seed=3, stop=[reply.sequences[0].tokens[2]])
    ).result()
    assert stopped.sequences[0].stop_reason == "stop"
    assert sampling.get_base_model() == "base"


def test_policy_losses_and_their_settings(client):
    training = client.create_lora_training_client("base", rank=2, seed=2).result()
    plain = training.forward([datum(TOKENS)], "cross_entropy").result()
    log_probs = np.array(plain.loss_fn_outputs[0]["logprobs"].data)
    old, advantages = (log_probs - 0.5).tolist(), [1.0, -1.0] * 3 + [2.0]
    ratio = np.exp(0.5)
    data = [datum(TOKENS, advantages=advantages, logprobs=old)]
    expected = {
        ("importance_sampling", None): -ratio * 2.0,
        ("ppo", None): -(3 * 1.2 + 2 * 1.2) + 3 * ratio,
        ("cispo", None): -(1.2 * np.array(advantages) * log_probs).sum(),
        ("dro", 0.4): 0.2 * 7 * 0.25 - (np.array(advantages) * log_probs).sum(),
    }
    for (loss, beta), value in expected.items():
        settings = None if beta is None else {"beta": beta}
        passed = training.forward_backward(data, loss, settings).result()
        assert passed.metrics["loss:sum"] == pytest.approx(value, rel=1e-4), loss
    with pytest.raises(tinker.RequestFailedError, match="no setting 'clip'; it has clip_low"):
        training.forward_backward(data, "ppo", {"clip": 0.1}).result()
    with pytest.raises(tinker.RequestFailedError, match="'gspo' is not supported"):
        training.forward_backward(data, "gspo").result()


@pytest.mark.parity
def test_losses_of_the_client_in_torch_have_the_gradient_of_the_servers(client):
    """Importance sampling, computed by torch from log-probs, and by name: the same updates."""
    torch = pytest.importorskip("torch")
    old, advantages = [-3.0] * 7, [1.0, -1.0] * 3 + [2.0]

    def loss(data, log_probs):
        total = sum(
            -(torch.exp(each - torch.tensor(old)) * torch.tensor(advantages)).sum()
            for each in log_probs
        )
        return total, {"mine": float(total)}

    results = []
    for is_custom in (True, False):
        training = client.create_lora_training_client("base", rank=2, seed=5).result()
        for _ in range(3):
            if is_custom:
                passed = training.forward_backward_custom([datum(TOKENS)], loss)
            else:
                data = [datum(TOKENS, advantages=advantages, logprobs=old)]
                passed = training.forward_backward(data, "importance_sampling")
            training.optim_step(ADAM).result()
        results.append(passed.result().metrics["loss:sum"])
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_checkpoints_are_saved_loaded_listed_downloaded_and_deleted(client, service_url):
    import httpx

    training = client.create_lora_training_client("base", rank=2, seed=3).result()
    training.forward_backward([datum(TOKENS)], "cross_entropy").result()
    training.optim_step(ADAM).result()
    saved = training.save_state("first").result().path
    assert saved == f"tinker://{training.model_id}/weights/first"
    with pytest.raises(tinker.RequestFailedError, match="exists; choose another"):
        training.save_state("first").result()
    assert training.save_state("first", overwrite=True).result().path == saved
    sampler = training.save_weights_for_sampler("for_sampling").result().path
    external = training.save_weights_external("peft").result().path
    other = client.create_training_client_from_state_with_optimizer(saved).result()
    fresh = client.create_training_client_from_state(saved).result()
    losses = []
    for each in (training, other, fresh):
        each.forward_backward([datum(TOKENS)], "cross_entropy").result()
        each.optim_step(ADAM).result()
        losses.append(each.forward([datum(TOKENS)], "cross_entropy").result().metrics["loss:sum"])
    assert losses[0] == losses[1] != losses[2]
    sampling = client.create_sampling_client(model_path=sampler).result()
    assert len(sampling.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()) == 8
    rest = tinker.RestClient(base_url=service_url, api_key=KEY)
    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    assert {c.checkpoint_type for c in listed} == {"training", "sampler", "external"}
    assert all(c.size_bytes > 0 for c in listed)
    run = rest.get_training_run(training.model_id).result()
    assert (run.lora_rank, run.last_checkpoint.tinker_path) == (2, saved)
    assert rest.get_weights_info_by_tinker_path(saved).result().lora_rank == 2
    urls = rest.get_external_weights_urls(external).result().urls
    assert set(urls) >= {"adapter_config.json", "adapter_model.safetensors"}
    assert httpx.get(urls["adapter_config.json"]).json()["r"] == 2
    rest.delete_checkpoint_from_tinker_path(saved).result()
    with pytest.raises(tinker.NotFoundError, match="not found"):
        client.create_training_client_from_state(saved).result()


def test_openai_endpoints_serve_every_saved_sampler_by_name(client, service_url):
    """More samplers than the two places of the engine: those used longest ago make way."""
    import httpx

    training = client.create_lora_training_client("base", rank=2, seed=11).result()
    names, texts = [], []
    for number in range(3):
        training.forward_backward([datum(TOKENS)], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.3)).result()
        names.append(training.save_weights_for_sampler(f"openai-{number}").result().path)
    for name in (*names, names[0]):
        body = {"model": name, "prompt": "over the", "max_tokens": 8, "temperature": 0}
        reply = httpx.post(f"{service_url}/v1/completions", json=body, timeout=300)
        assert reply.status_code == 200, reply.text
        assert reply.json()["model"] == name
        texts.append(reply.json()["choices"][0]["text"])
    assert texts[0] == texts[3] and len(set(texts)) > 1
    missing = {"model": names[0] + "-none", "prompt": "a", "max_tokens": 1}
    assert httpx.post(f"{service_url}/v1/completions", json=missing).status_code == 404


def test_clients_do_not_disturb_or_read_each_other(client, service_url):
    pairs = [client.create_lora_training_client("base", rank=2, seed=s).result() for s in (7, 8)]
    alone = client.create_lora_training_client("base", rank=2, seed=7).result()

    def step(training):
        passed = training.forward_backward([datum(TOKENS)], "cross_entropy")
        training.optim_step(ADAM)
        return passed

    interleaved = [[step(each) for each in pairs] for _ in range(3)]
    losses = [group[0].result().metrics["loss:sum"] for group in interleaved]
    assert losses == [step(alone).result().metrics["loss:sum"] for _ in range(3)]
    saved = pairs[0].save_state("mine").result().path
    with connect(service_url, OTHER_KEY) as other:
        with pytest.raises(tinker.NotFoundError, match="not found"):
            other.create_training_client_from_state(saved).result()
        rest = tinker.RestClient(base_url=service_url, api_key=OTHER_KEY)
        assert rest.list_training_runs().result().training_runs == []
        with pytest.raises(tinker.NotFoundError, match="not found"):
            rest.get_training_run(pairs[0].model_id).result()


def test_what_is_not_supported_says_so(client):
    with pytest.raises(tinker.BadRequestError, match="rank: 64; use 1 to 4, or start the server"):
        client.create_lora_training_client("base", rank=64).result()
    with pytest.raises(tinker.BadRequestError, match="all weights with jaxrl_llm"):
        client.create_lora_training_client("base", rank=0).result()
    with pytest.raises(tinker.BadRequestError, match="'other' is not trained here; use 'base'"):
        client.create_lora_training_client("other", rank=2).result()
    with pytest.raises(tinker.BadRequestError, match="train_unembed is ignored"):
        client.create_lora_training_client(
            "base", rank=2, train_mlp=False, train_attn=False
        ).result()
    training = client.create_lora_training_client("base", rank=2).result()
    failed = tinker.RequestFailedError
    with pytest.raises(failed, match="no gradients; call forward_backward first"):
        training.optim_step(ADAM).result()
    with pytest.raises(failed, match=r"beta2 is 1.0; use one in"):
        training.forward_backward([datum(TOKENS)], "cross_entropy").result()
        training.optim_step(types.AdamParams(beta2=1.0)).result()
    training.optim_step(ADAM).result()  # the gradient is still there
    with pytest.raises(failed, match="10000000 is not a token"):
        training.forward([datum([1, 10**7])], "cross_entropy").result()
    with pytest.raises(failed, match="65 tokens; a sequence has 2 to 64"):
        training.forward([datum(list(range(65)))], "cross_entropy").result()
    with pytest.raises(failed, match="no loss of this server reads 'mask'"):
        training.forward(
            [datum(TOKENS, mask=types.TensorData.from_numpy(np.ones(7, np.float32)))], "ppo"
        ).result()
    with pytest.raises(failed, match="kind='inflight': not supported"):
        training.save_weights_and_get_sampling_client(kind="inflight").result()
    sampling = client.create_sampling_client(base_model="base").result()
    prompt = types.ModelInput.from_ints(TOKENS)
    with pytest.raises(tinker.BadRequestError, match="prompt_alt_tokens_k: not supported"):
        sampling.sample(
            prompt, 1, types.SamplingParams(max_tokens=1), prompt_alt_tokens_k=2
        ).result()
    with pytest.raises(tinker.BadRequestError, match="max_tokens: 60 after a prompt of 8 tokens"):
        sampling.sample(prompt, 1, types.SamplingParams(max_tokens=60)).result()
    with pytest.raises(tinker.NotFoundError, match="not found"):
        client.create_sampling_client(
            model_path=f"tinker://{training.model_id}/sampler_weights/none"
        ).result()
