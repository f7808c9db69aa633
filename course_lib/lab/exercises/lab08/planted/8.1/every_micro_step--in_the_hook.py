class StepPerBucket:
    def __init__(self, wire, optimizers, scheduler):
        self.wire = wire
        self.optimizers = optimizers
        self.scheduler = scheduler
        self.handles = []

    def bucket_full(self, b, last):
        self.wire.launch(b).wait()
        self.optimizers[b].step()

    def finish(self):
        self.scheduler.step()
