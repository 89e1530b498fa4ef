"""Balance losses and the selection bias."""
