"""The control plane under random orders: one real MLflow store, manager and ingresses in one
process, in virtual time."""
