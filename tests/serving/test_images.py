"""Images in chats, by the real `openai` client: as data URIs, and refused in every other form."""

import asyncio
import base64
import io

import httpx2
import numpy as np
import openai
import pytest
from pictured import CONFIG, ONE_DEVICE, on
from PIL import Image
from serving_engine import CountingEngine

from jaxrl_llm.data import counting_task, datasets
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams
from jaxrl_llm.sampling import policy_sampler
from jaxrl_llm.saved_policy import SavedPolicy
from jaxrl_llm.serving import server
from jaxrl_llm.serving.app import make_app
from jaxrl_llm.serving.driver import Driver
from jaxrl_llm.serving.metrics import Metrics
from jaxrl_llm.serving.protocol import ServedModel

NUM_TOKENS = 6


def uri(contents):
    return "data:image/png;base64," + base64.b64encode(contents).decode()


def asking(*addresses, role="user", text="How many?"):
    parts = [{"type": "image_url", "image_url": {"url": address}} for address in addresses]
    return {"role": role, "content": [*parts, {"type": "text", "text": text}]}


def talking(served, engine, params, scenario):
    """Runs `scenario(client)` against the application in this process."""

    async def talk():
        driver = Driver(engine, params, max_waiting=4)
        app = make_app(served, driver, Metrics(driver), body_bytes=2**22)
        driver.start(call_soon=asyncio.get_running_loop().call_soon_threadsafe)
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
            client = openai.AsyncOpenAI(
                base_url="http://test/v1", api_key="none", http_client=http, max_retries=0
            )
            try:
                return await scenario(client)
            finally:
                driver.close()

    return asyncio.run(talk())


def refused(client, *messages):
    """Returns what the server says against messages."""

    async def ask():
        with pytest.raises(openai.BadRequestError) as error:
            await client.chat.completions.create(model="m", messages=list(messages), max_tokens=2)
        assert error.value.body["param"] == "messages", error.value
        return error.value.body["message"]

    return ask()


def picture(height, width):
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return uri(file.getvalue())


# What comes, and what is said.
WRONG = {
    "of the net": ("https://a.b/c.png", "nothing is downloaded; give the image itself"),
    "a file": ("/etc/hostname", "nothing is downloaded"),
    "a file's address": ("file:///etc/hostname", "nothing is downloaded"),
    "no base64": ("data:image/png;base64,???", "is no base64"),
    "cut short": (uri(counting_task.draw_image("cut")[0][:150]), "the image cannot be read"),
    "no image": (uri(b"hello"), "the image cannot be read, UnidentifiedImageError"),
    "huge": (picture(9000, 9000), "9000 x 9000 pixels, more than 67108864"),
    "too many tokens": (picture(80, 80), "this model takes 64: shorten the prompt"),
}


def test_a_reply_to_an_image_is_the_engines_and_wrong_images_are_400():
    config, models, params = on(ONE_DEVICE)
    sampler = policy_sampler.make_sampler(config, models, {})
    source = SavedPolicy("m", config, models, sampler, 64, lambda: (params, 0))
    served, weights = server.served_model(source), source.weights().params
    engine = server.make_engine(source, served, num_slots=4)
    given = CONFIG.data, models.tokenizer, "train", 0, None, models.image_processor
    prompt = datasets.load_dataset(*given).prompts[0]
    sights = models.image_feature_cache.image_inputs(prompt.images, len(prompt.tokens))
    greedy = SamplingParams(NUM_TOKENS, temperature=0.0, stop_tokens=models.eos_tokens)
    keys = np.zeros((1, 2), np.uint32)
    wanted = engine.generate(
        weights, [Request(prompt.tokens, keys, (greedy,), image_inputs=sights)]
    )[0][0]
    image, _ = counting_task.draw_image("shapes 0 train 0")

    async def scenario(client):
        fields = {"model": "m", "temperature": 0, "logprobs": True, "max_tokens": NUM_TOKENS}
        messages = [asking(uri(image))]
        reply = await client.chat.completions.create(messages=messages, **fields)
        assert reply.usage.prompt_tokens == len(prompt.tokens)
        found = [token.logprob for token in reply.choices[0].logprobs.content]
        np.testing.assert_allclose(found, wanted.log_probs, atol=1e-5)
        other = await client.chat.completions.create(
            messages=[asking(uri(counting_task.draw_image("shapes 0 train 1")[0]))], **fields
        )
        assert other.choices[0].logprobs.content[0].logprob != pytest.approx(found[0], abs=1e-6)
        for name, (address, said) in WRONG.items():
            message = await refused(client, asking(address))
            assert said in message, (name, message)
            where = "" if name == "too many tokens" else "messages.0.content, image 1: "
            assert message.startswith(where)
        assert "role 'user' or 'tool'" in await refused(client, asking(uri(image), role="system"))
        twice = asking(uri(image), text="<|image_pad|>")
        assert "renders 2 image placeholders" in await refused(client, twice)
        token = {"role": "user", "content": "<|image_pad|>"}
        assert "renders 1 image placeholders" in await refused(client, token)

    talking(served, engine, weights, scenario)


def test_a_model_of_text_refuses_images():
    async def scenario(client):
        said = await refused(client, asking(picture(8, 8)))
        assert said == "messages.0.content, image 1: this model is text-only; leave images out"

    served = ServedModel("m", character_tokenizer(), (1,), vocab_size=104, max_tokens=100)
    talking(served, CountingEngine(), 0.0, scenario)
