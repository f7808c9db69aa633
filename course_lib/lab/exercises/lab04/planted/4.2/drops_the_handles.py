class Reducer:
    def __init__(self, buckets, uses, wire):
        self.buckets = buckets
        self.uses_left = dict(uses)
        self.grads_left = [len(bucket) for bucket in buckets]
        self.bucket_of = {index: b for b, bucket in enumerate(buckets) for index in bucket}
        self.next_bucket = 0
        self.wire = wire
        self.handles = []

    def on_gradient_ready(self, index):
        self.uses_left[index] -= 1
        if self.uses_left[index]:
            return
        self.grads_left[self.bucket_of[index]] -= 1
        while self.next_bucket < len(self.buckets) and self.grads_left[self.next_bucket] == 0:
            self.wire.launch(self.next_bucket)
            self.next_bucket += 1
