"""Package managers and HTTP clients in a real sandbox, with nothing of the network configured inside.

Each fetches from `shop.test`, which the rules allow, and is refused at `elsewhere.test`, which they do not; both names are led
to the same server on this host, which counts. That the server's certificate is trusted is the only thing the tests arrange.
"""

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import pytest

import cloche
from tests.egress import room, shop


class Clients(NamedTuple):
    box: cloche.Sandbox
    shop: shop.Shop
    plain: shop.Shop

    def fetch(self, command: str, *, program: str) -> None:
        """Run `command` for both hosts (`HOST` in it stands for them): the refusal first, then its twin."""
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
        self.shop.asked.clear()
        self.plain.asked.clear()
        refused = self.box.exec(command.replace("HOST", "elsewhere.test"), timeout_s=300)
        said = refused.stdout + refused.stderr
        assert refused.exit_code != 0, said
        assert [host for host, _ in self.shop.asked + self.plain.asked if "elsewhere" in host] == [], said
        assert {d.target.partition(":")[0] for d in refused.denials} == {"elsewhere.test"}, (
            refused.denials,
            said,
        )
        assert {d.evidence for d in refused.denials} == {"proxy"}
        told = ("403", "denied", "forbidden", "resolve", "enotfound", "connectexception")
        assert any(word in said.lower() for word in told), said
        allowed = self.box.exec(command.replace("HOST", shop.HOST), timeout_s=300)
        assert allowed.exit_code == 0, allowed.stdout + allowed.stderr
        assert allowed.denials == ()
        assert self.shop.asked or self.plain.asked


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    scratch = tmp_path_factory.mktemp("shop")
    cert, key = room.certificate(scratch, shop.HOST, "elsewhere.test")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    (scratch / "repositories").mkdir()
    secure = shop.Shop(scratch / "repositories", context)
    plain = shop.Shop(scratch / "repositories", None)
    shop.stock(secure, scratch)
    plain.pages = secure.pages
    workspace = tmp_path_factory.mktemp("workspace")
    shutil.copy(cert, workspace / "ca.pem")
    led = {f"{host}:443": secure.address for host in (shop.HOST, "elsewhere.test")}
    led |= {f"{host}:80": plain.address for host in (shop.HOST, "elsewhere.test")}
    trusted = str(workspace / "ca.pem")
    names = (
        "SSL_CERT_FILE",
        "CURL_CA_BUNDLE",
        "GIT_SSL_CAINFO",
        "NODE_EXTRA_CA_CERTS",
        "PIP_CERT",
        "CARGO_HTTP_CAINFO",
    )
    try:
        with cloche.Sandbox(
            allow=[shop.HOST], resolve=led, workspace=str(workspace), memory_mib=2048, pids=1024, timeout_s=None,
            env=dict.fromkeys((*names, "npm_config_cafile"), trusted),
        ) as box:  # fmt: skip
            yield Clients(box, secure, plain)
    finally:
        secure.close()
        plain.close()


@pytest.mark.parametrize("prefix", ["", "env -u HTTPS_PROXY -u https_proxy -u ALL_PROXY -u all_proxy "])
def test_curl(clients: Clients, prefix: str) -> None:
    clients.fetch(f"{prefix}curl -fsS https://HOST/hello.txt", program="curl")


def test_wget(clients: Clients) -> None:
    clients.fetch("wget -nv -O- --ca-certificate=ca.pem https://HOST/hello.txt", program="wget")


def test_git_clones_and_pushes(clients: Clients) -> None:
    clients.fetch(
        "rm -rf copy && git clone -q https://HOST/git/glass.git copy && cd copy && grep -q git README"
        " && git -c user.name=a -c user.email=a@shop.test commit -q --allow-empty -m two && git push -q origin HEAD:refs/heads/side",
        program="git",
    )


def test_pip(clients: Clients) -> None:
    system = "PATH=/usr/local/bin:/usr/bin:/bin python3"  # a version manager's shim would write beside itself afterwards
    if subprocess.run(f"{system} -m pip --version", shell=True, capture_output=True, check=False).returncode:
        pytest.skip("the system's Python has no pip")
    clients.fetch(
        f"rm -rf wheels && {system} -m pip --disable-pip-version-check install --no-input --no-cache-dir --retries 1"
        f" --index-url https://HOST/simple --target wheels glass && PYTHONPATH=wheels {system} -c 'import glass'",
        program="python3",
    )


def test_npm(clients: Clients) -> None:
    clients.fetch(
        "rm -rf js && mkdir js && cd js && npm install --no-audit --no-fund --fetch-retries=0"
        " --registry https://HOST/npm/ glass && node -e 'require(\"glass\")'",
        program="npm",
    )


def test_node_fetch(clients: Clients) -> None:
    clients.fetch(
        "node -e 'fetch(\"https://HOST/hello.txt\").then(r => r.text()).then(console.log)'", program="node"
    )


def test_go(clients: Clients) -> None:
    clients.fetch(
        "rm -rf mod && mkdir mod && cd mod && export GOFLAGS=-mod=mod GONOSUMDB=* GOPROXY=https://HOST/go GOPATH=$PWD/path"
        f" && go mod init here && go mod download -x {shop.HOST}/glass@v1.0.0",
        program="go",
    )


def test_cargo(clients: Clients) -> None:
    clients.fetch(
        "rm -rf rs && mkdir -p rs/src && cd rs && touch src/lib.rs && export CARGO_HOME=$PWD/home CARGO_NET_RETRY=0"
        ' && printf \'[package]\\nname="here"\\nversion="1.0.0"\\nedition="2021"\\n[dependencies]\\nglass={version="1",'
        'registry="shop"}\\n\' > Cargo.toml && CARGO_REGISTRIES_SHOP_INDEX=sparse+https://HOST/crates/ cargo fetch',
        program="cargo",
    )


def test_apt(clients: Clients) -> None:
    clients.fetch(
        "rm -rf apt && mkdir -p apt/state/lists/partial apt/cache/archives/partial apt/etc && cd apt"
        " && touch state/status && echo 'deb [trusted=yes] http://HOST/apt ./' > etc/sources.list"
        ' && O="-o Dir::State=$PWD/state -o Dir::State::status=$PWD/state/status -o Dir::Cache=$PWD/cache'
        ' -o Dir::Etc=$PWD/etc -o APT::Sandbox::User=user -o Acquire::Retries=0 -o Acquire::http::Pipeline-Depth=0"'
        " && apt-get $O --error-on=any update && apt-get $O download glass && ls glass_1.0_all.deb",
        program="apt-get",
    )


def test_java(clients: Clients) -> None:
    clients.box.files.write(
        "Get.java",
        "import java.net.*; import java.net.http.*; public class Get { public static void main(String[] a) throws Exception {"
        " var r = HttpClient.newHttpClient().send(HttpRequest.newBuilder(URI.create(a[0])).build(),"
        " HttpResponse.BodyHandlers.ofString()); System.out.print(r.statusCode() + r.body());"
        " System.exit(r.statusCode() == 200 ? 0 : 1); } }",
    )
    clients.fetch(
        "test -f trust.p12 || keytool -importcert -noprompt -alias shop -file ca.pem -keystore trust.p12 -storepass secret"
        " -storetype PKCS12 2>/dev/null; java -Djavax.net.ssl.trustStore=$PWD/trust.p12"
        " -Djavax.net.ssl.trustStorePassword=secret Get.java https://HOST/hello.txt",
        program="javac",
    )


def test_what_python_has_itself(clients: Clients) -> None:
    clients.fetch(
        "python3 -c 'import urllib.request as u; print(u.urlopen(\"https://HOST/hello.txt\").read())'",
        program="python3",
    )
