"""The receiver of a node: its grants, and the ports that listen for data connections."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from batonpb import node_pb2

from baton.endpoint import join_endpoint, split_endpoint
from baton.errors import BatonError, Reason
from baton.ids import Incarnation
from baton.rpc import Channels
from kvtransfer.checksums import RecordChecks
from kvtransfer.protocol.receiver import ReceiverMachine
from kvtransfer.receiver import PortEvents, Receiver, ReceiverHost, ReceiverPorts
from kvtransfer.transport import ReceiverPort, TransportName
from kvtransfer.transports.cuda_ipc import CudaIpcReceiverPort
from kvtransfer.transports.rdma import RdmaMemory, RdmaReceiverPort
from kvtransfer.transports.receiver_port import PORT_LIMITS, PortLimits
from kvtransfer.transports.shm import SHM_PORT_LIMITS, ShmReceiverPort
from kvtransfer.transports.tcp import TCP_PORT_LIMITS, TcpReceiverPort
from kvtransfer.transports.ucx import UCX_PORT_LIMITS, UcxReceiverPort
from node.config import NodeConfig
from node.pool import DevicePool, RegionTransports, add_fact
from node.regions import checksum_thread


def make_receiver(
    config: NodeConfig, pool: DevicePool, *, host: ReceiverHost, own: Incarnation, channels: Channels
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
        ),
    )
    receiver.ports = ReceiverPorts(receiver)
    return receiver


def open_ports(config: NodeConfig, pool: DevicePool, transports: RegionTransports, ports: ReceiverPorts) -> None:
    """Listen for data connections on each transport; `ports.close` ends it, after a failure too. Raises BatonError
    PORT_IN_USE or BAD_ENDPOINT."""
    for transport in transports.offered:
        ports.add(_open_port(transport, config, pool, ports, transports.rdma))


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
    transport: TransportName,
    config: NodeConfig,
    pool: DevicePool,
    ports: ReceiverPorts,
    memory: RdmaMemory | None,
) -> ReceiverPort:
    """What the links of rdma and ucx have to say goes to a port of its own, on the host of tcp's."""
    events = PortEvents(ports, transport)
    host, _ = split_endpoint(config.data_listen or config.listen)
    listen = join_endpoint(host, 0)
    if transport is TransportName.TCP:
        listen = config.data_listen or listen
    advertise_host = config.data_advertise_host
    if advertise_host is None and config.advertise is not None:
        advertise_host, _ = split_endpoint(config.advertise)

    def limits(of_transport: PortLimits) -> PortLimits:
        receiver = config.receiver
        return replace(of_transport, connections_max=receiver.connections_max, pairs_max=receiver.pairs_max)

    try:
        if transport in (TransportName.SHM, TransportName.CUDA_IPC):
            make = ShmReceiverPort if transport is TransportName.SHM else CudaIpcReceiverPort
            return make(region=pool.region, events=events, limits=limits(SHM_PORT_LIMITS))
        if transport is TransportName.RDMA:
            assert memory is not None
            return RdmaReceiverPort(
                memory=memory,
                events=events,
                listen=listen,
                advertise_host=advertise_host,
                offered=lambda works: ports.offer(TransportName.RDMA, works),
                limits=limits(PORT_LIMITS),
            )
        if transport is TransportName.UCX:
            return UcxReceiverPort(
                region=pool.host_region,
                events=events,
                listen=listen,
                advertise_host=advertise_host,
                config=config.ucx,
                limits=limits(UCX_PORT_LIMITS),
            )
        return TcpReceiverPort(
            region=pool.tcp_region,
            events=events,
            listen=listen,
            advertise_host=advertise_host,
            limits=limits(TCP_PORT_LIMITS),
        )
    except OSError as error:
        why = str(error.strerror or error).lower()
        raise BatonError(
            Reason.PORT_IN_USE,
            f"Cannot listen for data connections on {listen}: {why}. Choose another place with --data-listen.",
            field="data_listen",
        ) from error
