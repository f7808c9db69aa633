class StepPerBucket:
    def __init__(self, wire, optimizers, scheduler):
        self.wire = wire
        self.optimizers = optimizers
        self.scheduler = scheduler
        self.handles = []

    def bucket_full(self, b, last):
        if last:
            handle = self.wire.launch(b)
            while not handle.is_completed():
                pass
            self.handles.append((b, handle))

    def finish(self):
        for b, handle in self.handles:
            self.optimizers[b].step()
        self.scheduler.step()
        self.handles = []
