"""A client without the cluster's key that sends packets to process b. stranger.py HOST PORT [PUBLIC_KEY]

Without PUBLIC_KEY it connects without encryption; with PUBLIC_KEY it uses a foreign key pair. When the server closes
the connection, it prints in hex all bytes that the server sent. The bytes pass through a relay in this process.
"""

from __future__ import annotations

import socket
import sys
import threading

import zmq

from asterism.bus.transport.packets import Packet, encode_packet


def main(host: str, port: int, public_key: bytes) -> None:
    received_bytes = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server, zmq.Context() as context:
        wire = threading.Thread(target=relay_and_record, args=(server, (host, port), received_bytes))
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
            dealer.send(encode_packet(Packet("x", "b", 0, 0, 0, 0, 0, [b"x"])))
            dealer.send(encode_packet(Packet("x", "b", 0, -1, 0, 0, 0, [])))
            wire.join()
    sys.stdout.write(received_bytes.hex() + "\n")


def relay_and_record(server: socket.socket, to: tuple[str, int], received_bytes: bytearray) -> None:
    """Relay both directions until the server closes the connection. Record the bytes that the server sends."""
    near, _ = server.accept()
    with near, socket.create_connection(to) as far:
        threading.Thread(target=copy_bytes, args=(near, far), daemon=True).start()
        while data := receive(far):
            received_bytes += data
            near.sendall(data)


def copy_bytes(source: socket.socket, target: socket.socket) -> None:
    while data := receive(source):
        try:
            target.sendall(data)
        except OSError:  # the connection was closed
            return


def receive(source: socket.socket) -> bytes:
    try:
        return source.recv(1 << 16)
    except OSError:  # the connection was reset, or the other thread closed the socket
        return b""


main(sys.argv[1], int(sys.argv[2]), sys.argv[3].encode() if len(sys.argv) > 3 else b"")
