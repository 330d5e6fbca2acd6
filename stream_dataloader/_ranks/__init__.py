"""Several processes, each a rank with a loader of its own, share an epoch.

`place` finds which rank this is, `store` and `keys` exchange values between ranks, `meeting` finds the ranks that
begin an epoch, `rendezvous` has them compare what they are about to read, and `agreement` decides which steps belong
to the epoch on all of them. It imports `dataset`, `_reading` and what lies below. Open `ranks` first.
"""
