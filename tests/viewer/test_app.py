"""The application answers about its runs alone, and only to names that are its own."""

import made_runs
import pytest
from starlette.testclient import TestClient

from jaxrl_llm.viewer.app import make_app
from jaxrl_llm.viewer.runs import RecordedRun


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        RecordedRun(made_runs.make(folder / name, 20, 3, seed=i)) for i, name in enumerate("ab")
    ]
    return TestClient(make_app(runs, ["localhost"]), base_url="http://localhost")


def test_app_serves_runs_and_curves(client):
    about = client.get("/api/runs").json()
    assert [run["name"] for run in about["runs"]] == ["a", "b"]
    assert about["runs"][0]["dumps"] == list(range(1, 21)) and about["chosen"][0][0] == "reward"
    names = ["critic/score/mean", "no/such"]
    curves = client.get("/api/curves", params={"name": names}).json()
    assert len(curves[names[0]]) == 2 and curves["no/such"] == [[[], []], [[], []]]


def test_app_serves_samples(client):
    found = client.get("/api/runs/1/samples", params={"step": 20, "max_score": 0.5}).json()
    assert [sample["row"] for sample in found["samples"]] == [2]
    assert client.get("/api/runs/1/samples/20/2").json()["mask"] == [1, 0, 1, 1]
    for path, code in {
        "/api/runs/2/samples": 404,
        "/api/runs/0/samples/20/9": 404,
        "/api/runs/0/samples?min_score=x": 400,
        "/api/runs/0/samples/..%2f..%2fconfig.json/0": 404,
        "/page.py": 404,
        "/../app.py": 404,
    }.items():
        assert client.get(path).status_code == code, path


def test_the_page_takes_nothing_from_elsewhere(client):
    for path in ("/", "/page.js", "/page.css"):
        answer = client.get(path)
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in answer.text and "innerHTML" not in answer.text
    assert client.get("/", headers={"host": "elsewhere.example"}).status_code == 400
