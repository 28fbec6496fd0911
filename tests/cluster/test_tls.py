"""A cluster with TLS: it trains, gives no word to who has no certificate, and sends its token to nobody in the clear."""

import json
import socket
import threading
from pathlib import Path

import pytest

from raystride.pipelines.launch.cluster.certificates import make_certificates
from tests.cluster import in_the_clear
from tests.cluster.hosts import Host, unable
from tests.cluster.ray_hosts import PORT, PYTHON, RayHosts
from tests.tiny import write_text

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(unable()), reason=f"no hosts here: {unable()}"),
]
SETTINGS = """
    --model.layers 1 --model.heads 2 --model.hidden_size 16 --model.context 16 --tokenizer.kind bytes --sample.tokens 0
    --data.kind text --data.validation tail --data.validation_fraction 0.1 --validation.every 0 --record.mlflow false
    --train.slots 2 --train.slot_size 2 --train.steps 10 --scaling.workers 2
"""
ANY_PROTOCOL = 3
ASK = """
import json, socket, ssl, sys
host, port, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def hears(own):
    context = ssl.create_default_context(cafile=f"{folder}/ca.pem")
    context.set_alpn_protocols(["h2"])
    if own:
        context.load_cert_chain(f"{folder}/host.pem", f"{folder}/host.key")
    try:
        with context.wrap_socket(socket.create_connection((host, port), 10), server_hostname=host) as connection:
            connection.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
            return len(connection.recv(100)) > 0
    except OSError:
        return False
print(json.dumps({"without a certificate": hears(False), "with one": hears(True)}))
"""
"""Whether a port answers a client of HTTP/2 over TLS."""


class _Ear(threading.Thread):
    """Hears all that passes a host's cable, and keeps how often words stand in it."""

    def __init__(self, link: str, *words: bytes) -> None:
        super().__init__(daemon=True)
        self.heard, self.frames = dict.fromkeys(words, 0), 0
        self._ended = threading.Event()
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ANY_PROTOCOL))
        self._socket.bind((link, 0))
        self._socket.settimeout(0.2)
        self.start()

    def run(self) -> None:
        """Listens until it is told to end."""
        while not self._ended.is_set():
            try:
                frame = self._socket.recv(2**16)
            except TimeoutError:
                continue
            self.frames += 1
            for word in self.heard:
                self.heard[word] += word in frame

    def end(self) -> None:
        """Ends it."""
        self._ended.set()
        self.join()
        self._socket.close()


@pytest.mark.weekly
def test_a_cluster_with_tls_trains_and_tells_nobody_else_a_word(tmp_path: Path) -> None:
    write_text(tmp_path)

    def own(host: Host) -> dict[str, str]:
        (folder,) = make_certificates(
            tmp_path / "tls", [f"{host.address},{host.name}"], str(tmp_path / "tls" / host.address), 2
        )
        lines = (folder / "ray.env").read_text().splitlines()
        return dict(line.removeprefix("export ").split("=", 1) for line in lines)

    with RayHosts(tmp_path, 2, others=1, own=own) as cluster:
        token, user = (tmp_path / "token").read_bytes(), cluster.hosts[2]
        ear = _Ear(cluster.hosts[1].link, token, b"RayTrainWorker")
        cluster.wait_for(2)
        asked = [str(PYTHON), "-c", ASK, cluster.head.address, str(PORT), str(tmp_path / "tls" / user.address)]
        assert json.loads(user.run(*asked).stdout) == {"without a certificate": False, "with one": True}
        plainly = [str(PYTHON), in_the_clear.__file__, cluster.head.address, str(PORT)]
        assert json.loads(user.run(*plainly).stdout) is False
        place = ["--storage", str(tmp_path), "--data.source", str(tmp_path / "text.txt"), "--run", "secret"]
        # From the head, as through ssh: the dashboard has no TLS, so nobody should speak to it over a network.
        code, said = cluster.submit(cluster.head, "train", *SETTINGS.split(), *place)
        assert code == 0, said
        ear.end()
    summary = json.loads((tmp_path / "secret" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["workers"]) == ("finished", 10, 2)
    assert ear.frames > 500
    assert ear.heard == {token: 0, b"RayTrainWorker": 0}, ear.frames
