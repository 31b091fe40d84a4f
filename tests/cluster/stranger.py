"""Somebody without the cluster's key, who sends parcels to its process b. stranger.py HOST PORT [ITS_PUBLIC_KEY]

He speaks without encryption; or, where he knows the public key, with a key pair of his own. Prints, once he was hung up
on, each byte that he was sent, in hex: all of them pass through this process on their way to his socket.
"""

from __future__ import annotations

import socket
import sys
import threading

import zmq

from bus.parcels import Parcel, encode_parcel


def main(host: str, port: int, public_key: bytes) -> None:
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server, zmq.Context() as context:
        wire = threading.Thread(target=pass_on, args=(server, (host, port), heard))
        wire.start()
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RECONNECT_IVL, -1)
            if public_key:
                dealer.setsockopt(zmq.CURVE_SERVERKEY, public_key)
                public, secret = zmq.curve_keypair()
                dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
                dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
            dealer.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
            dealer.send(encode_parcel(Parcel("x", "b", 0, 0, 0, 0, 0, [b"x"])))
            dealer.send(encode_parcel(Parcel("x", "b", 0, -1, 0, 0, 0, [])))
            wire.join()
    sys.stdout.write(heard.hex() + "\n")


def pass_on(server: socket.socket, to: tuple[str, int], heard: bytearray) -> None:
    """Both ways between the one who connects and that address, until the latter hangs up."""
    near, _ = server.accept()
    with near, socket.create_connection(to) as far:
        threading.Thread(target=pour, args=(near, far), daemon=True).start()
        while data := received(far):
            heard += data
            near.sendall(data)


def pour(source: socket.socket, target: socket.socket) -> None:
    while data := received(source):
        try:
            target.sendall(data)
        except OSError:  # it was hung up on
            return


def received(source: socket.socket) -> bytes:
    try:
        return source.recv(1 << 16)
    except OSError:  # reset, or closed by the other thread
        return b""


main(sys.argv[1], int(sys.argv[2]), sys.argv[3].encode() if len(sys.argv) > 3 else b"")
