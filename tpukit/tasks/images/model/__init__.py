"""The network: any timm model."""
