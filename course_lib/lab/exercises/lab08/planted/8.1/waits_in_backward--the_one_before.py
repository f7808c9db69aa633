class StepPerBucket:
    def __init__(self, wire, optimizers, scheduler):
        self.wire = wire
        self.optimizers = optimizers
        self.scheduler = scheduler
        self.handles = []

    def bucket_full(self, b, last):
        if last:
            if self.handles:
                before, handle = self.handles.pop()
                handle.wait()
                self.optimizers[before].step()
            self.handles.append((b, self.wire.launch(b)))

    def finish(self):
        for b, handle in self.handles:
            handle.wait()
            self.optimizers[b].step()
        self.scheduler.step()
        self.handles = []
