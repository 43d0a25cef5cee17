"""Drives every command of a daemon with qemu.qmp: SOCKET is its monitor, PLACE a directory for disks and sockets."""

import asyncio
import socket
import sys

from qemu.qmp import ExecuteError, QMPClient

SOCKET, PLACE = sys.argv[1:]


async def refused(client, command, arguments, error_class="GenericError"):
    try:
        await client.execute(command, arguments)
    except ExecuteError as error:
        assert error.error_class == error_class, error
    else:
        raise AssertionError(f"{command} {arguments} should fail")


async def main():
    client = QMPClient("egret")
    await client.connect(SOCKET)
    run = client.execute
    driven = set()

    async def drive(command, arguments=None):
        driven.add(command)
        return await run(command, arguments)

    version = await drive("query-version")
    assert version["package"].startswith("egret-")
    commands = {command["name"] for command in await drive("query-commands")}
    schema = await drive("query-qmp-schema")
    described = {entry["name"] for entry in schema if entry["meta-type"] == "command"}
    assert described == commands, described ^ commands

    with open(f"{PLACE}/disk.img", "wb") as image:
        image.truncate(1 << 20)
    await drive("object-add", {"qom-type": "iothread", "id": "io0", "poll-max-ns": 10000})
    assert "io0" in [entry["name"] for entry in await drive("qom-list", {"path": "/objects"})]
    await drive("qom-set", {"path": "/objects/io0", "property": "poll-max-ns", "value": 20000})
    assert await drive("qom-get", {"path": "/objects/io0", "property": "poll-max-ns"}) == 20000
    assert (await drive("query-iothreads"))[0]["poll-max-ns"] == 20000
    await drive("blockdev-add", {"driver": "file", "node-name": "d0", "filename": f"{PLACE}/disk.img"})
    export = {"type": "vhost-user-blk", "id": "e0", "node-name": "d0", "iothread": "io0", "writable": True,
              "addr": {"type": "unix", "path": f"{PLACE}/e0.sock"}}
    await drive("block-export-add", export)
    await drive("block-export-resume", {"id": "e0"})
    assert (await drive("query-block-exports"))[0]["io-status"] == "ok"
    await drive("blockdev-set-active", {"node-name": "d0", "active": True})
    await refused(client, "blockdev-set-active", {"node-name": "d0", "active": False})
    reopened = {"driver": "file", "node-name": "d0", "filename": f"{PLACE}/disk.img", "discard": "unmap"}
    assert "pause-ns" in await drive("blockdev-reopen", {"options": [reopened]})
    limits = {"bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 100000, "iops_rd": 0, "iops_wr": 0}
    await drive("block_set_io_throttle", {"id": "d0"} | limits)
    await run("object-add", {"qom-type": "iothread", "id": "io1"})
    await drive("egret-move-queue", {"id": "e0", "queue": 0, "iothread": "io1"})
    assert (await run("query-block-exports"))[0]["iothread-vq-mapping"] == [{"iothread": "io1", "vqs": [0]}]
    await drive("egret-map-queues", {"id": "e0", "iothread-vq-mapping": [{"iothread": "io0", "vqs": [0]}]})
    await run("object-del", {"id": "io1"})
    await drive("nbd-server-start", {"addr": {"type": "unix", "data": {"path": f"{PLACE}/nbd.sock"}}})
    await drive("nbd-server-add", {"device": "d0", "name": "n0"})
    await run("block-export-add", {"type": "nbd", "id": "n1", "node-name": "d0", "name": "disk", "writable": True})
    await refused(client, "nbd-server-add", {"device": "d0", "name": "disk"})
    with client.listener("BLOCK_EXPORT_DELETED") as deleted:
        await drive("nbd-server-remove", {"name": "n0"})
        assert (await asyncio.wait_for(deleted.get(), 30))["data"] == {"id": "n0"}
        await drive("nbd-server-stop")
        assert (await asyncio.wait_for(deleted.get(), 30))["data"] == {"id": "n1"}
    await drive("block_resize", {"node-name": "d0", "size": 2 << 20})
    assert (await drive("query-named-block-nodes"))[0]["image"]["virtual-size"] == 2 << 20
    assert (await drive("query-blockstats"))[0]["stats"]["rd_operations"] == 0
    assert (await drive("egret-query-stats"))["exports"][0]["total"]["in-flight"] == 0

    limits = {"id": "d0", "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 100, "iops_rd": 0, "iops_wr": 0,
              "iops_max": 1000, "iops_max_length": 5, "group": "g"}
    await drive("block_set_io_throttle", limits)
    node = (await drive("query-named-block-nodes"))[0]
    assert (node["iops"], node["iops_max"], node["iops_max_length"], node["group"]) == (100, 1000, 5, "g"), node
    await refused(client, "block_set_io_throttle", limits | {"iops_rd": 1})

    with open(f"{PLACE}/unit.img", "wb") as image:
        image.truncate(1 << 20)
    await drive("blockdev-add", {"driver": "file", "node-name": "d1", "filename": f"{PLACE}/unit.img"})
    await drive("block-export-add", {"type": "vhost-user-scsi", "id": "s0", "iothread": "io0", "writable": True,
                                     "addr": {"type": "unix", "path": f"{PLACE}/s0.sock"}})
    unit = {"id": "s0", "lun": 5, "node-name": "d1", "serial": "five"}
    await drive("egret-lun-add", unit)
    shown = [export["luns"] for export in await drive("query-block-exports") if export["id"] == "s0"]
    assert shown == [[{"target": 0, "lun": 5, "node-name": "d1", "serial": "five"}]], shown
    await refused(client, "egret-lun-add", unit)
    await refused(client, "egret-lun-del", {"id": "s0", "lun": 6}, "DeviceNotFound")
    with client.listener("EGRET_LUN_DELETED") as deleted:
        await drive("egret-lun-del", {"id": "s0", "lun": 5})
        gone = (await asyncio.wait_for(deleted.get(), 30))["data"]
        assert gone == {"id": "s0", "target": 0, "lun": 5, "node-name": "d1"}, gone
    await drive("block-export-del", {"id": "s0"})
    await drive("blockdev-del", {"node-name": "d1"})

    await refused(client, "add-fd", {})
    with open(f"{PLACE}/unit.img", "r+b") as image, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{PLACE}/handed.sock")
        listener.listen()
        client.send_fd_scm(image.fileno())
        handed = await drive("add-fd", {"fdset-id": 3, "opaque": "image"})
        await run("blockdev-add", {"driver": "file", "node-name": "d2", "filename": "/dev/fdset/3"})
        sets = [{"fdset-id": 3, "fds": [{"fd": handed["fd"], "opaque": "image"}]}]
        assert await drive("query-fdsets") == sets
        client.send_fd_scm(listener.fileno())
        await drive("getfd", {"fdname": "socket"})
        await run("block-export-add", {"type": "vhost-user-blk", "id": "e2", "node-name": "d2", "writable": True,
                                       "addr": {"type": "fd", "str": "socket"}})
        await refused(client, "closefd", {"fdname": "socket"})
        client.send_fd_scm(listener.fileno())
        await run("getfd", {"fdname": "unused"})
        await drive("closefd", {"fdname": "unused"})
        with client.listener("BLOCK_EXPORT_DELETED") as deleted:
            await run("block-export-del", {"id": "e2"})
            await asyncio.wait_for(deleted.get(), 30)
        await run("blockdev-del", {"node-name": "d2"})
        await drive("remove-fd", {"fdset-id": 3})

    await refused(client, "no-such-command", {}, "CommandNotFound")
    await refused(client, "qom-get", {"path": "/objects/x", "property": "id"}, "DeviceNotFound")
    await refused(client, "blockdev-del", {"node-name": "d0"})
    await refused(client, "object-del", {"id": "io0"})
    await refused(client, "block-export-add", export)

    with client.listener("BLOCK_EXPORT_DELETED") as deleted:
        await drive("block-export-del", {"id": "e0"})
        assert (await asyncio.wait_for(deleted.get(), 30))["data"] == {"id": "e0"}
    await drive("blockdev-del", {"node-name": "d0"})
    await drive("object-del", {"id": "io0"})
    with client.listener("SHUTDOWN") as shutdown:
        await drive("quit")
        assert (await asyncio.wait_for(shutdown.get(), 30))["data"]["reason"] == "host-qmp-quit"
    missing = commands - driven - {"qmp_capabilities"}
    assert not missing, f"not driven: {missing}"
    try:
        await client.disconnect()
    except EOFError:
        pass  # The daemon was faster.
    print(f"drove {len(driven)} commands")


asyncio.run(main())
