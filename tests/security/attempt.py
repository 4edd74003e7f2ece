"""Runs inside a sandbox and tries to reach something, many things at once; says what it saw of each.

Words come as hexadecimal, because their bytes matter: no shell, library or resolver of ours must spell them another way.
"""

import concurrent.futures
import json
import socket
import ssl
import struct
import sys

PROXY = ("127.0.0.1", 3128)
SECONDS = 8


def opened(address=PROXY):
    made = socket.create_connection(address, SECONDS)
    made.settimeout(SECONDS)
    return made


def rest(sock):
    found = b""
    try:
        while len(found) < 20000:
            part = sock.recv(4096)
            if not part:
                break
            found += part
    except OSError as problem:
        found += b"!" + repr(problem).encode()
    return found.decode("latin-1")


def head(sock):
    found = b""
    while b"\r\n\r\n" not in found:
        part = sock.recv(4096)
        if not part:
            break
        found += part
    return found.decode("latin-1")


def get(host, path, port=b"80"):
    if b":" in host and not host.startswith(b"["):
        host = b"[" + host + b"]"
    host += b"" if port in (b"80", b"443") else b":" + port
    return b"GET /" + path + b" HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n"


def connect(host, port, token):
    """Through CONNECT, then HTTP inside."""
    sock = opened()
    sock.sendall(b"CONNECT " + host + b":" + port + b" HTTP/1.1\r\nHost: " + host + b":" + port + b"\r\n\r\n")
    answer = head(sock)
    if " 200" not in answer.partition("\r\n")[0]:
        return answer
    sock.sendall(get(host, token, port))
    return answer + rest(sock)


def absolute(host, port, token):
    """Through a proxy request in absolute form."""
    sock = opened()
    place = host if port == b"80" else host + b":" + port
    sock.sendall(
        b"GET http://"
        + place
        + b"/"
        + token
        + b" HTTP/1.1\r\nHost: "
        + place
        + b"\r\nConnection: close\r\n\r\n"
    )
    return rest(sock)


def socks(host, port, token):
    """Through SOCKS5, by name."""
    sock = opened()
    sock.sendall(b"\x05\x01\x00")
    if sock.recv(2) != b"\x05\x00":
        return "no socks"
    sock.sendall(b"\x05\x01\x00\x03" + bytes([len(host) & 255]) + host + struct.pack(">H", int(port)))
    answer = sock.recv(10)
    if answer[1:2] != b"\x00":
        return f"refused {answer[1:2].hex()}"
    sock.sendall(get(host, token, port))
    return rest(sock)


def socks_address(host, port, token):
    """Through SOCKS5, by address."""
    sock = opened()
    sock.sendall(b"\x05\x01\x00")
    sock.recv(2)
    text = host.decode()
    family, kind = (socket.AF_INET6, b"\x04") if ":" in text else (socket.AF_INET, b"\x01")
    sock.sendall(b"\x05\x01\x00" + kind + socket.inet_pton(family, text) + struct.pack(">H", int(port)))
    answer = sock.recv(10)
    if answer[1:2] != b"\x00":
        return f"refused {answer[1:2].hex()}"
    sock.sendall(get(host, token, port))
    return rest(sock)


def socks_udp(host, port, token):
    """A UDP association, which would carry anything anywhere."""
    sock = opened()
    sock.sendall(b"\x05\x01\x00")
    sock.recv(2)
    sock.sendall(b"\x05\x03\x00\x01" + b"\0" * 6)
    return f"answer {sock.recv(10)[1:2].hex()}"


def direct(host, port, token):
    """As a client that has never heard of proxies."""
    sock = opened((host.decode(), int(port)))
    sock.sendall(get(host, token, port))
    return rest(sock)


def tls(host, port, token, name, sni):
    """CONNECT to one host, greet another."""
    sock = opened()
    sock.sendall(b"CONNECT " + host + b":" + port + b" HTTP/1.1\r\n\r\n")
    answer = head(sock)
    if " 200" not in answer.partition("\r\n")[0]:
        return answer
    return greet(sock, token, name, sni)


def tls_direct(host, port, token, name, sni):
    """The same without a proxy."""
    return greet(opened((host.decode(), int(port))), token, name, sni)


def greet(sock, token, name, sni):
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with context.wrap_socket(sock, server_hostname=sni.decode() or None) as inside:
        inside.sendall(get(name, token))
        return rest(inside)


def raw(data):
    """Bytes to the proxy as they are."""
    sock = opened()
    sock.sendall(data)
    return rest(sock)


def raw_direct(host, port, data):
    """Bytes to a captured connection as they are."""
    sock = opened((host.decode(), int(port)))
    sock.sendall(data)
    return rest(sock)


def datagram(host, port, token):
    sock = socket.socket(socket.AF_INET6 if b":" in host else socket.AF_INET, socket.SOCK_DGRAM)
    sock.settimeout(1)
    sock.sendto(token, (host.decode(), int(port)))
    return "sent"


def name(question, kind):
    """Ask the sandbox's name service."""
    labels = b"".join(bytes([len(part)]) + part for part in question.split(b".")) + b"\0"
    query = struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0) + labels + struct.pack(">HH", int(kind), 1)
    with open("/etc/resolv.conf") as file:
        server = next(line.split()[1] for line in file if line.startswith("nameserver"))
    sock = socket.socket(socket.AF_INET6 if ":" in server else socket.AF_INET, socket.SOCK_DGRAM)
    sock.settimeout(SECONDS)
    sock.sendto(query, (server, 53))
    answer = sock.recv(4096)
    return {"code": answer[3] & 15, "answers": struct.unpack(">H", answer[6:8])[0]}


def family(number, kind, protocol):
    socket.socket(int(number), int(kind), int(protocol))
    return "made"


def tried(way, words):
    try:
        return globals()[way](*(bytes.fromhex(word) for word in words))
    except (OSError, ValueError, UnicodeError) as problem:
        return repr(problem)


def main():
    """The tries, [[way, [word in hexadecimal, ...]], ...], come on stdin; what each saw goes out."""
    tries = json.load(sys.stdin)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(lambda one: tried(*one), tries))
    json.dump([one[:400] if isinstance(one, str) else one for one in seen], sys.stdout)


main()
