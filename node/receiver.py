"""The receiver of a decode node: its grants, and the ports that listen for data connections."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from batonpb import node_pb2

from baton.endpoint import join_endpoint, split_endpoint
from baton.errors import BatonError, Reason
from baton.ids import Incarnation
from baton.rpc import Channels
from kvtransfer.checksums import RecordChecks
from kvtransfer.link import check_some_work
from kvtransfer.protocol.receiver import ReceiverMachine
from kvtransfer.receiver import Receiver, ReceiverHost, ReceiverPorts
from kvtransfer.transport import ReceiverPort, TransportName
from kvtransfer.transports.cuda_ipc import CudaIpcReceiverPort
from kvtransfer.transports.limits import PORT_LIMITS, PortLimits
from kvtransfer.transports.rdma_device import LentRegistration, register_if_usable
from kvtransfer.transports.rdma_receiver import RdmaReceiverPort
from kvtransfer.transports.shm_receiver import SHM_PORT_LIMITS, ShmReceiverPort
from kvtransfer.transports.tcp_receiver import TCP_PORT_LIMITS, TcpReceiverPort
from kvtransfer.transports.ucx import usable
from kvtransfer.transports.ucx_receiver import UCX_PORT_LIMITS, UcxReceiverPort
from node.config import ReceiverNodeConfig
from node.pool import DevicePool, add_fact
from node.regions import checksum_thread, offered, rdma_region

LimitsT = TypeVar("LimitsT", bound=PortLimits)


def make_receiver(
    config: ReceiverNodeConfig, pool: DevicePool, *, host: ReceiverHost, own: Incarnation, channels: Channels
) -> Receiver:
    """A receiver without ports: `open_ports` opens them."""
    receiver = Receiver(
        incarnation=own,
        grants=ReceiverMachine(pool.ledger),
        layout=pool.layout,
        host=host,
        channels=channels,
        loop=asyncio.get_running_loop(),
        config=config.receiver,
        checks=RecordChecks(
            checksum_thread(pool.region, name=config.name),
            pool.layout,
            num_blocks=pool.ledger.num_blocks,
            loop=asyncio.get_running_loop(),
        ),
    )
    receiver.ports = ReceiverPorts(receiver)
    return receiver


def open_ports(
    config: ReceiverNodeConfig, pool: DevicePool, ports: ReceiverPorts, lent: LentRegistration | None = None
) -> None:
    """Listen for data connections on each transport; `ports.close` ends it, after a failure too. The region is
    registered for rdma here, unless that is `lent`.

    Raises BatonError PORT_IN_USE or BAD_ENDPOINT, InvalidField.
    """
    serving = offered(config.transports, pool.region)
    for transport in serving:
        if transport is TransportName.RDMA:
            _open_rdma_port(config, pool, ports, serving, lent)
        elif transport is TransportName.UCX:
            _open_ucx_port(config, pool, ports, serving)
        else:
            ports.add(_open_port(transport, config, pool, ports))
    check_some_work(ports.transports)


def add_status(receiver: Receiver, message: node_pb2.NodeStatus) -> None:
    """What each writer holds here, what was refused, and each port's own figures."""
    message.writers.extend(receiver.holdings.of_writers())
    for what, count in sorted(receiver.refused.items()):
        message.counters.add(name=f"refused: {what}", value=count)
    message.counters.add(name="records checked", value=receiver.checks.records)
    for (writer, transport), count in sorted(receiver.checks.corrupt.items()):
        message.counters.add(name=f"CORRUPT handoffs from {writer} over {transport}", value=count)
    for name, port in receiver.ports.describe().items():
        if "registered" in port:
            add_fact(message, name.value, str(port["registered"]))
        for what, figure in port.items():
            if isinstance(figure, int):
                message.counters.add(name=f"{name.value}: {what}", value=figure)
            elif isinstance(figure, dict):
                for kind, times in figure.items():
                    message.counters.add(name=f"{name.value}: {what} {kind}", value=times)


def _open_port(
    transport: TransportName, config: ReceiverNodeConfig, pool: DevicePool, ports: ReceiverPorts
) -> ReceiverPort:
    events = ports.port_events(transport)
    if transport is TransportName.CUDA_IPC:
        return CudaIpcReceiverPort(
            region=pool.region,
            events=events,
            limits=_limits(config, SHM_PORT_LIMITS),
        )
    if transport is TransportName.SHM:
        return ShmReceiverPort(
            region=pool.region,
            events=events,
            limits=_limits(config, SHM_PORT_LIMITS),
        )
    assert transport is TransportName.TCP, transport
    host, _ = split_endpoint(config.listen)
    listen = config.data_listen or join_endpoint(host, 0)
    with _port_errors(listen):
        return TcpReceiverPort(
            region=pool.tcp_region,
            events=events,
            listen=listen,
            advertise_host=_advertise_host(config),
            limits=_limits(config, TCP_PORT_LIMITS),
        )


def _open_rdma_port(
    config: ReceiverNodeConfig,
    pool: DevicePool,
    ports: ReceiverPorts,
    serving: Sequence[TransportName],
    lent: LentRegistration | None,
) -> None:
    """Only where a device works. What its links have to say goes to a port of its own, on the host of tcp's."""
    if lent is not None:
        memory = lent.memory
    else:
        memory = register_if_usable(serving, rdma_region(pool.region), config.rdma, remote_writes=True)
    if memory is None:
        return
    if lent is None:
        ports.close_last(memory.close)
    host, _ = split_endpoint(config.data_listen or config.listen)
    listen = join_endpoint(host, 0)
    with _port_errors(listen):
        port = RdmaReceiverPort(
            memory=memory,
            events=ports.port_events(TransportName.RDMA),
            listen=listen,
            advertise_host=_advertise_host(config),
            offered=lambda works: ports.offer(TransportName.RDMA, works),
            limits=_limits(config, PORT_LIMITS),
        )
    ports.add(port)


def _open_ucx_port(
    config: ReceiverNodeConfig, pool: DevicePool, ports: ReceiverPorts, serving: Sequence[TransportName]
) -> None:
    """Only where NIXL is there. What its links have to say goes to a port of its own, on the host of tcp's."""
    if not usable(serving, config.ucx.tls):
        return
    host, _ = split_endpoint(config.data_listen or config.listen)
    listen = join_endpoint(host, 0)
    with _port_errors(listen):
        port = UcxReceiverPort(
            region=pool.host_region,
            events=ports.port_events(TransportName.UCX),
            listen=listen,
            advertise_host=_advertise_host(config),
            config=config.ucx,
            limits=_limits(config, UCX_PORT_LIMITS),
        )
    ports.add(port)


def _limits(config: ReceiverNodeConfig, limits: LimitsT) -> LimitsT:
    """Those of a transport's ports, with what is set for all of them."""
    return replace(limits, connections_max=config.receiver.connections_max, pairs_max=config.receiver.pairs_max)


def _advertise_host(config: ReceiverNodeConfig) -> str | None:
    if config.data_advertise_host is None and config.advertise is not None:
        host, _ = split_endpoint(config.advertise)
        return host
    return config.data_advertise_host


@contextmanager
def _port_errors(listen: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = str(error.strerror or error).lower()
        raise BatonError(
            Reason.PORT_IN_USE,
            f"Cannot listen for data connections on {listen}: {why}. Choose another place with --data-listen.",
            field="data_listen",
        ) from error
