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
        while not all(handle.is_completed() for b, handle in self.handles):
            pass
        for b, handle in self.handles:
            self.optimizers[b].step()
        self.scheduler.step()
        self.handles = []
