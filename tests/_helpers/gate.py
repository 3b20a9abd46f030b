"""Both programs that publish, run strictly on one wheel."""

import make_index

from _helpers.servers import Uploads


class Gate:
    def __init__(self, publish, site, capsys):
        self.publish, self.site, self.capsys = publish, site, capsys

    def upload(self, wheel, *options, **hooks):
        """(exit status, everything printed, {name: bytes} that the index received)"""
        with Uploads(**hooks) as server:
            status, printed = self.publish(wheel, "--repository-url", server.url, *options, strict=True)
        return status, printed, server.received

    def index(self, folder, *options):
        """(exit status, everything printed); adds the wheels of the folder to the site."""
        self.capsys.readouterr()
        status = make_index.main([str(folder), str(self.site), *map(str, options)])
        return status, "".join(self.capsys.readouterr())

    def refuses(self, wheel, *options):
        """What both say; neither sends nor writes anything."""
        status, sent, received = self.upload(wheel, *options)
        assert (status, received) == (1, {}), sent
        status, written = self.index(wheel.parent, *options)
        assert status == 1 and {path.name for path in self.site.rglob("*")} <= {".lock"}, written
        return sent, written

    def accepts(self, wheel, *options):
        """What both say, which publish the wheel."""
        status, sent, received = self.upload(wheel, *options)
        assert status == 0 and received == {wheel.name: wheel.read_bytes()}, sent
        status, written = self.index(wheel.parent, *options)
        assert status == 0 and f"added      {wheel.name}" in written, written
        return sent, written
