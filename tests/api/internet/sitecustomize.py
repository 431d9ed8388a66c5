"""Python imports this at its start: allowed.test has an address of the internet, which leads to the
port OUTSIDE of this machine, and so has changing.test each first time that it is looked up. The
look-up of hanging.test never ends."""

import itertools
import os
import socket
import threading

ADDRESS = "93.184.215.14"
PLACES = {
    "allowed.test": itertools.repeat(ADDRESS),
    "changing.test": itertools.cycle([ADDRESS, "127.0.0.1"]),
}
getaddrinfo, create_connection = socket.getaddrinfo, socket.create_connection


def resolved(host, port, *args, **options):  # type: ignore[no-untyped-def]
    if host == "hanging.test":
        threading.Event().wait()
    place = next(PLACES[host]) if host in PLACES else host
    return getaddrinfo(place, port, *args, **options)


def connected(address, *args, **options):  # type: ignore[no-untyped-def]
    if address[0] == ADDRESS:
        address = ("127.0.0.1", int(os.environ["OUTSIDE"]))
    return create_connection(address, *args, **options)


socket.getaddrinfo, socket.create_connection = resolved, connected
