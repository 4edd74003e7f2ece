"""The egress of an engine: `interfaces.Egress` on the proxy process.

Translates between the engine's words (a policy's network, flows, denials) and the proxy's (rule sets, records), and says which
variables lead programs inside to the proxy. Clients that know no proxy are captured; the variables make others say plainly
what they want, and be told plainly what is refused.
"""

from __future__ import annotations

import msgspec

from cloche import errors, interfaces, model, policy
from cloche.egress import authority, capture, process, records
from cloche.policy import rules

_PROXY = f"http://127.0.0.1:{capture.PROXY_PORT}"
# Not a SOCKS address in ALL_PROXY: Python's clients fail at the sight of one unless an extra package is there.
_PROXY_NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FTP_PROXY")
_NO_PROXY = "localhost,127.0.0.1,::1,.localhost"


class LocalEgress(interfaces.Egress):
    def __init__(self, *, parent: str = "", authorities: str | None = None) -> None:
        options = records.Options(parent=parent, authorities=_read(authorities))
        self.on_flow = lambda _: None
        self.on_fault = lambda _: None
        self.on_ask = _nobody
        self._process = process.EgressProcess(
            options=options, on_record=self._recorded, on_fault=self._faulted, on_ask=self._asked
        )

    def check(self, network: policy.Network) -> None:
        _rule_set(network)

    async def start(self) -> None:
        await self._process.start()

    def environment(self, trust: str | None) -> dict[str, str]:
        led = dict.fromkeys(_PROXY_NAMES, _PROXY) | {"NO_PROXY": _NO_PROXY}
        led |= {name.lower(): value for name, value in led.items()}
        return led | (authority.variables(trust) if trust is not None else {})

    def sees_inside(self, network: policy.Network) -> bool:
        return _rule_set(network).index.conditional

    async def trust(self) -> bytes:
        return authority.bundle(await self._process.certificate())

    async def attach(
        self,
        sandbox: str,
        capture: interfaces.Capture,
        permit: interfaces.Permit,
        credentials: interfaces.Credentials | None = None,
    ) -> None:
        sealed = credentials.fd if credentials is not None else None
        await self._process.attach(
            sandbox, capture.sockets, _permitted(permit), inspects=permit.trusted, credentials=sealed
        )

    async def update(self, sandbox: str, permit: interfaces.Permit) -> None:
        await self._process.update(sandbox, _permitted(permit), inspects=permit.trusted)

    async def detach(self, sandbox: str) -> None:
        await self._process.detach(sandbox)

    async def aclose(self) -> None:
        await self._process.aclose()

    async def _asked(self, ask: records.Ask) -> tuple[bool, str]:
        question = model.Question(
            id="", sandbox=ask.sandbox, host=ask.host, port=ask.port, protocol=ask.protocol, rule=ask.rule
        )
        return await self.on_ask(question, ask.peer)

    def _faulted(self, reason: str) -> None:
        self.on_fault(reason)

    def _recorded(self, record: records.Record) -> None:
        denial = record.denial()
        self.on_flow(
            interfaces.Flow(
                sandbox=record.sandbox, stage=record.stage, verdict=record.verdict, operation=record.protocol,
                target=record.target, reason=record.reason, rule=record.rule, source=record.source,
                method=record.method, address=record.address, peer=record.peer, bytes_up=record.bytes_up,
                bytes_down=record.bytes_down, duration_ms=record.duration_ms, dropped=record.dropped,
                secret=record.secret, place=record.place, denial=denial,
            )
        )  # fmt: skip


async def _nobody(question: model.Question, peer: tuple[str, int] | None) -> tuple[bool, str]:
    return False, "nobody can be asked here"


def _read(path: str | None) -> str:
    if path is None:
        return ""
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except (OSError, ValueError) as problem:
        raise errors.error(
            "settings_invalid",
            f"network.authorities: {path} cannot be read: {problem}",
            hint="name a PEM file",
        ) from None


def _permitted(permit: interfaces.Permit) -> rules.RuleSet:
    made = _rule_set(permit.network)
    granted = tuple(map(rules.Rule.parse, permit.granted))
    return msgspec.structs.replace(made, asks=permit.asks, granted=granted)


def _rule_set(network: policy.Network) -> rules.RuleSet:
    return rules.RuleSet.make(
        network.mode, allow=network.allow, deny=network.deny, ask=network.ask, resolve=network.resolve
    )
