class StepPerBucket:
    def __init__(self, wire, optimizers, scheduler):
        self.wire = wire
        self.optimizers = optimizers
        self.scheduler = scheduler
        self.handles = []

    def bucket_full(self, b, last):
        if last and b == len(self.optimizers) - 1:
            self.handles = [(full, self.wire.launch(full)) for full in range(b + 1)]

    def finish(self):
        for b, handle in self.handles:
            handle.wait()
            self.optimizers[b].step()
        self.scheduler.step()
        self.handles = []
