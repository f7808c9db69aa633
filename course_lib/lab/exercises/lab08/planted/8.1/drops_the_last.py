class StepPerBucket:
    def __init__(self, wire, optimizers, scheduler):
        self.wire = wire
        self.optimizers = optimizers
        self.scheduler = scheduler
        self.handles = []

    def bucket_full(self, b, last):
        if last:
            self.handles.append((b, self.wire.launch(b)))

    def finish(self):
        before = None
        for b, handle in self.handles:
            if before is not None:
                self.optimizers[before].step()
            handle.wait()
            before = b
        self.scheduler.step()
        self.handles = []
