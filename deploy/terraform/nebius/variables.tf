variable "project_id" {
  description = "Project in which everything is created, such as project-e00abc"
  type        = string

  validation {
    condition     = startswith(var.project_id, "project-")
    error_message = "project_id must be the ID of a project: it starts with project-."
  }
}

variable "subnet_id" {
  description = "Subnet of the project for the nodes and the control plane"
  type        = string

  validation {
    condition     = startswith(var.subnet_id, "vpcsubnet-")
    error_message = "subnet_id must be the ID of a subnet: it starts with vpcsubnet-."
  }
}

variable "name" {
  description = "Prefix of the names of all resources"
  type        = string
  default     = "seatrial"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,40}$", var.name))
    error_message = "name must start with a letter and have at most 41 lower-case letters, digits and hyphens."
  }
}

variable "scheduler" {
  description = "What runs the trial: kubernetes (pods), or soperator (Slurm in pods)"
  type        = string
  default     = "kubernetes"

  validation {
    condition     = contains(["kubernetes", "soperator"], var.scheduler)
    error_message = "scheduler must be kubernetes or soperator."
  }
}

variable "gpu_model" {
  description = "GPU model of the nodes, which have 8 GPUs each"
  type        = string
  default     = "h100"

  validation {
    condition     = contains(["h100", "h200"], var.gpu_model)
    error_message = "gpu_model must be h100 or h200."
  }
}

variable "gpu_node_count" {
  description = "Number of GPU nodes"
  type        = number
  default     = 2

  validation {
    condition     = var.gpu_node_count >= 1 && var.gpu_node_count <= 100 && floor(var.gpu_node_count) == var.gpu_node_count
    error_message = "gpu_node_count must be an integer from 1 to 100; larger clusters have several node groups."
  }
}

variable "cpu_node_count" {
  description = "Number of nodes without GPUs, for operators"
  type        = number
  default     = 2

  validation {
    condition     = var.cpu_node_count >= 1 && floor(var.cpu_node_count) == var.cpu_node_count
    error_message = "cpu_node_count must be an integer of at least 1."
  }
}

variable "infiniband_fabric" {
  description = "InfiniBand fabric of the region and GPU model: https://docs.nebius.com/compute/clusters/gpu#fabrics"
  type        = string

  validation {
    condition     = length(var.infiniband_fabric) > 0
    error_message = "infiniband_fabric must be the name of a fabric, such as fabric-3."
  }
}

variable "reservation_ids" {
  description = "Capacity block groups for the GPU nodes, in order of preference; empty for nodes on demand"
  type        = list(string)
  default     = []
}

variable "kubernetes_version" {
  description = "Kubernetes version of the control plane and the nodes, such as 1.31"
  type        = string
  default     = "1.31"

  validation {
    condition     = can(regex("^1\\.[0-9]+$", var.kubernetes_version))
    error_message = "kubernetes_version must be MAJOR.MINOR, such as 1.31."
  }
}

variable "drivers_preset" {
  description = "NVIDIA drivers on the GPU nodes; the provider's schema lists the presets for each Kubernetes version"
  type        = string
  default     = "cuda12.8"
}

variable "filesystem_gib" {
  description = "Size of the shared filesystem in GiB"
  type        = number
  default     = 1024

  validation {
    condition     = var.filesystem_gib >= 100
    error_message = "filesystem_gib must be at least 100."
  }
}

variable "api_allowed_cidrs" {
  description = "Networks that may reach the Kubernetes API, such as your own address with /32"
  type        = list(string)

  validation {
    condition     = length(var.api_allowed_cidrs) > 0 && alltrue([for cidr in var.api_allowed_cidrs : can(cidrhost(cidr, 0))])
    error_message = "api_allowed_cidrs must list at least one network in CIDR notation: an empty list opens the API to everyone."
  }
}

variable "ssh_user" {
  description = "User that is created on the GPU nodes"
  type        = string
  default     = "ubuntu"
}

variable "ssh_public_key" {
  description = "Public SSH key of ssh_user"
  type        = string

  validation {
    condition     = can(regex("^(ssh-(ed25519|rsa)|ecdsa-sha2-nistp[0-9]+) ", var.ssh_public_key))
    error_message = "ssh_public_key must be a public key in OpenSSH format, such as the content of ~/.ssh/id_ed25519.pub."
  }
}

variable "taint_until_accepted" {
  description = "Keep pods without a toleration away from new GPU nodes until they are accepted"
  type        = bool
  default     = false
}

variable "replace_rejected_nodes" {
  description = "Replace GPU nodes whose condition seatrial.dev/Accepted is FALSE"
  type        = bool
  default     = false
}

variable "replace_rejected_after" {
  description = "Time for which the condition must be FALSE before a node is replaced, such as 30m"
  type        = string
  default     = "30m"

  validation {
    condition     = can(regex("^([0-9]+(\\.[0-9]+)?(ms|s|m|h|d))+$", var.replace_rejected_after))
    error_message = "replace_rejected_after must be a duration such as 30m or 1h30m."
  }
}
