"""Files between the processes of a run: real connections, wrong secrets, names and lengths."""

import http.client

import pytest

from jaxrl_llm.checkpoint import peer_files


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    server = peer_files.PeerServer(folder, "127.0.0.1", "secret")
    yield folder, server.address
    server.close()


def test_a_file_is_sent_and_fetched(server, tmp_path):
    folder, address = server
    path = tmp_path / "12.3-8"
    path.write_bytes(bytes(range(256)) * 10_000)
    peer_files.send(path, address, "secret")
    assert (folder / "12.3-8").read_bytes() == path.read_bytes()
    peer_files.fetch("12.3-8", address, "secret", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()
    assert [p.name for p in folder.iterdir()] == ["12.3-8"]
    with pytest.raises(OSError, match=r"has no 13.3-8: HTTP status 404"):
        peer_files.fetch("13.3-8", address, "secret", tmp_path / "copy")


@pytest.mark.parametrize(
    "secret, name", [("wrong", "1.0-2"), ("secret", "host"), ("secret", "a.tmp")]
)
def test_others_are_refused(server, tmp_path, secret, name):
    folder, address = server
    (tmp_path / name).write_bytes(b"content")
    with pytest.raises(OSError):
        peer_files.send(tmp_path / name, address, secret)
    with pytest.raises(OSError, match="403"):
        peer_files.fetch(name, address, secret, tmp_path / "copy")
    assert not list(folder.iterdir())


def test_a_cut_connection_leaves_no_file(server):
    folder, address = server
    host, _, port = address.partition(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.putrequest("PUT", "/1.0-2")
    connection.putheader("Authorization", "secret")
    connection.putheader("Content-Length", "100")
    connection.endheaders(b"only a part")
    connection.sock.shutdown(1)
    assert connection.getresponse().status == 507
    connection.close()
    assert not list(folder.iterdir())


def test_a_dead_host_is_an_error(tmp_path):
    path = tmp_path / "1.0-2"
    path.write_bytes(b"x")
    with pytest.raises(OSError):
        peer_files.send(path, "127.0.0.1:1", "secret")
